"""PyTorch Lightning trains a pipeline in processes as it does in one, and what cannot work there is refused by name."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock._base.errors import ArgumentError
from scaffolding.patient import PENSTOCK, TEST_SECONDS, finished
from scaffolding.ranks import Ranks
from scaffolding.scripts import lines_here, lines_of_torchrun

JOB = Path(__file__).with_name("lightning_job.py")
EXAMPLE = Path(__file__).parents[2] / "examples" / "train_lightning.py"
RUN = (*PENSTOCK, "run", "--ranks", "2")

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # Lightning's own
    pytest.mark.timeout(TEST_SECONDS),
]


def test_a_run_goes_on_as_it_would_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own checkpoint."""
    monkeypatch.chdir(tmp_path)
    steps = lines_here(EXAMPLE, "--steps", "40")
    assert [line.split()[1] for line in steps] == ["20", "40"]
    assert lines_here(EXAMPLE, "--steps", "40", "--resume", "runs/lightning/step=20.ckpt") == steps[1:]


@pytest.mark.long  # two stages of one process: above
@pytest.mark.distributed
def test_several_processes_go_on_from_it(ranks2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    steps = lines_here(EXAMPLE, "--steps", "40")
    again = ("--steps", "40", "--resume", "runs/lightning/step=20.ckpt")
    assert ranks2.run(lines_of_torchrun, EXAMPLE, *again) == [steps[1:], []]


@pytest.mark.distributed
def test_validation_logging_and_early_stopping_agree_on_all_ranks(
    ranks2: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (alone,) = lines_here(JOB)
    _, steps, expected = json.loads(alone)
    assert steps == 6, "EarlyStopping ended it after three epochs of two"
    assert float.fromhex(expected.pop("rank")) == 0
    for rank, (line,) in enumerate(ranks2.run(lines_of_torchrun, JOB)):
        number, taken, shown = json.loads(line)
        assert (number, taken) == (rank, 6)
        assert float.fromhex(shown.pop("rank")) == 2, "0 and 1 were added, for two batches"
        assert shown == expected


@pytest.mark.long
@pytest.mark.distributed
def test_a_rank_that_raises_is_named_last(tmp_path: Path) -> None:
    done = finished(*RUN, JOB, "fail", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "penstock: rank 1 failed outside of a step: ValueError: the data ran dry"


@pytest.fixture
def refused() -> ModuleType:
    """Imported by those who use it: Lightning takes two seconds, and every worker collects all tests."""
    return importlib.import_module("lightning_job")


@pytest.mark.parametrize(
    ("module", "options", "says"),
    [
        ({"manual": False}, {}, "automatic_optimization is True, and Lightning would run backward after"),
        ({"has_pipe": False}, {}, "Module.pipe is None: expected a pipeline, as penstock.pipeline returns it"),
        (
            {},
            {"callbacks": ["EMAWeightAveraging"]},
            "callback EMAWeightAveraging does not reach .* keep torch.optim.swa_utils.AveragedModel.self.pipe.model",
        ),
        ({}, {"callbacks": ["LearningRateFinder"]}, "LearningRateFinder does not reach .* set the learning rate"),
        ({}, {"precision": "bf16-mixed"}, "Trainer.precision='bf16-mixed'. does not reach the pipeline's stages"),
    ],
)
def test_what_cannot_work_is_refused(
    refused: ModuleType, tmp_path: Path, module: dict[str, Any], options: dict[str, Any], says: str
) -> None:
    options = {**options, "callbacks": [getattr(refused.callbacks, name)() for name in options.get("callbacks", ())]}
    with pytest.raises(ArgumentError, match=says):
        refused.fit(tmp_path, refused.Module(**module), **options)


def test_what_does_not_reach_a_pipeline_is_refused_by_lightning(refused: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(refused.MisconfigurationException, match="manual optimization"):
        refused.fit(tmp_path, refused.Module(), gradient_clip_val=1.0)
    with pytest.raises(ArgumentError, match="there is no checkpoint"):
        refused.fit(tmp_path, refused.Module(), checkpoint=tmp_path)


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.delitem(sys.modules, "penstock.integrations.lightning", raising=False)
    with pytest.raises(ImportError, match=r"pip install penstock\[lightning\]"):
        importlib.import_module("penstock.integrations.lightning")
