"""The programs in `examples/` that fine-tune models of transformers do what a loop without Penstock does."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup

from scaffolding.ranks import Ranks
from scaffolding.scripts import lines_here, lines_of_rank

EXAMPLES = Path(__file__).parents[1] / "examples"
LOOP = EXAMPLES / "finetune_transformers.py"
TRAINER = EXAMPLES / "finetune_trainer.py"
ACCELERATE = EXAMPLES / "finetune_accelerate.py"
SHORT = ("--epochs", "1", "--texts", "64", "--folder")

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs


def pieces(batch: dict[str, Any], number: int) -> list[dict[str, Any]]:
    """A batch's microbatches, each in memory of its own; whole values go to each."""
    cut = {name: value.tensor_split(number) for name, value in batch.items() if value.dim()}
    rest = {name: value for name, value in batch.items() if not value.dim()}
    return [{**rest, **{name: parts[k].clone() for name, parts in cut.items()}} for k in range(number)]


def without_penstock(example: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """The weights after an epoch of gradient accumulation by hand, and the last step's loss."""
    torch.manual_seed(0)
    model, tokenizer = example["small_model"]()
    batches = example["loader"](tokenizer, 64, seed=1)
    next(iter(batches))  # the example batch
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = get_cosine_schedule_with_warmup(optimizer, 0, len(batches))
    loss = torch.zeros(())
    for batch in batches:
        losses = [model(**piece).loss for piece in pieces(example["with_count"](batch), 4)]
        for loss in losses:
            loss.backward()
        loss = sum(losses, torch.zeros(())).detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model.state_dict(), float(loss)


def lines_of_torchrun(rank: int, script: Path, *arguments: str | Path) -> list[str]:
    """What a rank of a pool prints, which Accelerate believes to be torchrun's."""
    AcceleratorState._reset_state(reset_partial_state=True)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, str(rank))
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, "2")
        return lines_here(script, *arguments)


@pytest.mark.distributed
def test_loop_is_that_of_one_device(tmp_path: Path, one_thread: None, ranks2: Ranks) -> None:
    lines = lines_here(LOOP, *SHORT, tmp_path / "alone")
    assert ranks2.run(lines_of_rank, LOOP, *SHORT, tmp_path / "split") == [lines, []]
    expected, loss = without_penstock(runpy.run_path(str(LOOP)))
    assert lines[0].split()[3] == f"{loss:.6f}"
    alone, split = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("alone", "split"))
    assert alone.keys() == split.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(alone[name], value), name
        torch.testing.assert_close(split[name], value, rtol=0, atol=1e-5)  # the tied embedding's gradient is rounded
    assert len(AutoTokenizer.from_pretrained(tmp_path / "split")) == 160


@pytest.mark.distributed
@pytest.mark.long  # tests/integrations/test_trainer.py has the Trainer beside the plain one; the rest is like the loop
def test_trainer_goes_on_from_what_other_ranks_saved(tmp_path: Path, ranks2: Ranks) -> None:
    short = ("--epochs", "2", "--texts", "64", "--folder", tmp_path / "trainer")
    AcceleratorState._reset_state(reset_partial_state=True)
    lines = lines_here(TRAINER, *short)
    steps = [line for line in lines if line.startswith("step")]
    assert [(line.split()[1], line.split()[2]) for line in steps] == [
        ("2", "loss"), ("2", "eval_loss"), ("4", "loss"), ("4", "eval_loss"),
    ]  # fmt: skip
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "trainer").state_dict()
    shutil.rmtree(tmp_path / "trainer" / "checkpoint-4")
    assert ranks2.run(lines_of_torchrun, TRAINER, *short, "--resume") == [steps[2:], []]
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "trainer").state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-5)  # the tied embedding's gradient is rounded


@pytest.mark.distributed
@pytest.mark.long  # like the loop
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prints_what_the_loop_prints(tmp_path: Path, ranks2: Ranks, precision: str) -> None:
    options = (*SHORT, tmp_path / "accelerate", "--precision", precision)
    AcceleratorState._reset_state(reset_partial_state=True)
    lines = lines_here(ACCELERATE, *options)
    assert ranks2.run(lines_of_torchrun, ACCELERATE, *options) == [lines, []]
    if precision == "no":
        words = lines_here(LOOP, *SHORT, tmp_path / "loop")[0].split()
        assert lines[0].split()[:3] == words[:3]
        shown = [float(lines[0].split()[place]) for place in (3, 6)]
        assert shown == [pytest.approx(float(words[place]), abs=1e-4) for place in (3, 6)]
