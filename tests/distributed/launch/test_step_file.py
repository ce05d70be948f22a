"""Who looks on from outside learns which training step is under way."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock
from penstock._base.errors import ArgumentError
from penstock.distributed.launch.step_file import read_step


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PENSTOCK_STEP_FILE", str(tmp_path / "step"))
    return tmp_path / "step"


def pipeline(path: Path, seen: list[int]) -> penstock.Pipeline:
    """Notes what the file says whenever the loss of a microbatch is computed."""

    def loss(output: Tensor, target: Tensor) -> Tensor:
        seen.append(read_step(path))
        return F.mse_loss(output, target)

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    return penstock.pipeline(model, (torch.randn(4, 4),), loss=loss, microbatches=2, ranks=2)


def test_training_steps_are_announced_when_they_begin_and_evaluations_are_not(path: Path) -> None:
    assert read_step(path) == -1
    seen: list[int] = []
    with pipeline(path, seen) as pipe:
        x, target = torch.randn(4, 4), torch.randn(4, 2)
        pipe.evaluate(x, target=target)
        for _ in range(2):
            pipe.step(x, target=target)
        pipe.evaluate(x, target=target)
        pipe.step_count = 1000  # as a checkpoint does
        pipe.step(x, target=target)
    assert seen == [-1, -1, 0, 0, 1, 1, 1, 1, 1000, 1000]
    assert path.read_bytes() == (1000).to_bytes(8, "little")


def test_only_rank_0_announces(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    seen: list[int] = []
    with pipeline(path, seen) as pipe:
        pipe.step(torch.randn(4, 4), target=torch.randn(4, 2))
    assert seen == [-1, -1]
    assert not path.exists()


def test_file_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "nowhere" / "step"
    monkeypatch.setenv("PENSTOCK_STEP_FILE", str(path))
    with pytest.raises(ArgumentError, match=f"PENSTOCK_STEP_FILE is '{path}', which cannot be written"):
        pipeline(path, [])
