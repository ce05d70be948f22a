"""What a checkpoint brings back besides tensors: in one process, where it costs little."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock import ArgumentError, checkpoint
from scaffolding.models import squared_error
from scaffolding.small import WIDTH, batch


def made(seed: int, ranks: int = 2, dropout: float = 0.4) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))))
    return penstock.pipeline(model, batch()[:1], loss=squared_error, ranks=ranks, microbatches=3, seed=seed)


def losses(pipe: penstock.Pipeline, steps: int) -> list[float]:
    x, y = batch()
    return [float(pipe.step(x, target=y).loss) for _ in range(steps)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_go_on_as_they_were_in_a_pipeline_of_another_seed(tmp_path: Path, ranks: int) -> None:
    with made(seed=3) as pipe:
        losses(pipe, 2)
        checkpoint.save(tmp_path, pipe)
        expected = losses(pipe, 2)
    with made(seed=8, ranks=ranks) as other:
        restored = checkpoint.load(tmp_path, other)
        assert restored is not None
        assert (other.seed, other.step_count, restored.step) == (3, 2, 2)
        assert losses(other, 2) == expected
    assert expected[0] != expected[1]


def test_the_order_of_torch_save_is_answered_with_the_right_one(tmp_path: Path) -> None:
    with made(seed=0) as pipe:
        for act in (checkpoint.save, checkpoint.load):
            with pytest.raises(ArgumentError, match=r"expected a Pipeline, not a .*Path; save and load take"):
                act(pipe, tmp_path)  # type: ignore[operator]


def test_a_write_in_the_background_ends_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with made(seed=0) as pipe:
        path = checkpoint.save("checkpoints", pipe, blocking=False)
        monkeypatch.chdir("elsewhere")
        checkpoint.wait_for_save(pipe)
        assert path == checkpoint.latest(tmp_path / "checkpoints")


def of(dtype: torch.dtype) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2)))
    return penstock.pipeline(model, (batch()[0].to(dtype),), loss=lambda y: y.mean(), ranks=2, microbatches=2)


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_checkpoint_of_another_dtype_is_refused(tmp_path: Path, saved: torch.dtype, loaded: torch.dtype) -> None:
    """A cast would lose digits of parameters and moments, and training would not go on as it would have."""
    with of(saved) as pipe:
        checkpoint.save(tmp_path, pipe)
        weights = dict(pipe.named_parameters())
    with of(loaded) as other:
        mine = {name: parameter.detach().fill_(7) for name, parameter in other.named_parameters()}
        dtypes = f"in {saved}, and here it is in {loaded}; make the model in the dtype in which it was saved"
        with pytest.raises(ArgumentError, match=f"0.weight {dtypes}; `import_safetensors` takes"):
            checkpoint.load(tmp_path, other)
        assert all((one == 7).all() for one in mine.values()), "nothing was changed"
        checkpoint.import_safetensors(tmp_path, other)
        assert all(torch.equal(one, weights[name].to(loaded)) for name, one in mine.items())


class Sums(torch.optim.Optimizer):
    """Keeps float32 beside weights in bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.full(parameter.shape, 1 / 3)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's own casts to the parameter's dtype."""
        for number, state in state_dict["state"].items():
            self.state[self.param_groups[0]["params"][number]] = state


def test_an_optimizers_state_keeps_its_own_precision(tmp_path: Path) -> None:
    with of(torch.bfloat16) as pipe:
        optimizer = Sums(pipe.parameters())
        optimizer.step()
        checkpoint.save(tmp_path, pipe, optimizer)
    with of(torch.bfloat16) as other:
        loaded = Sums(other.parameters())
        checkpoint.load(tmp_path, other, loaded)
        assert all(torch.equal(loaded.state[p]["sum"], torch.full(p.shape, 1 / 3)) for p in other.parameters())
