"""The programs in `examples/` run, give the same figures alone, in processes, and without Penstock."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, get_cosine_schedule_with_warmup
from typer.testing import CliRunner

import penstock
from penstock.cli import app
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.scripts import lines_here, lines_of_rank, lines_of_torchrun

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_target_is_verified() -> None:
    done = CliRunner().invoke(app, ["verify", f"{EXAMPLES}/target_mlp.py:target", "--ranks", "3"])
    assert done.exit_code == 0, done.output
    assert "6 of 6 gradients are bitwise identical" in done.stdout


@pytest.mark.distributed
def test_gpt_learns_the_same_alone_and_in_processes(capsys: pytest.CaptureFixture[str], ranks2: Ranks) -> None:
    script, steps = EXAMPLES / "train_gpt.py", ("--steps", "40")
    alone = lines_here(script, *steps)
    assert capsys.readouterr().err == ""
    assert [line.split()[1] for line in alone] == ["20", "40"]
    losses = [float(line.split()[3]) for line in alone]
    assert losses[1] < losses[0] < 2.0
    assert ranks2.run(lines_of_rank, script, "--steps", "20") == [alone[:1], []]


def trained_by_hand(example: dict[str, Any], epochs: int, number: int) -> tuple[nn.Module, float]:
    """The vision model after plain PyTorch's accumulation of four microbatches, and the last loss."""
    torch.manual_seed(0)
    next(iter(example["batches"](0, number)))  # the example batch
    model, steps = example["network"](), len(example["batches"](0, number))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, epochs=epochs, steps_per_epoch=steps)
    losses = [torch.zeros(())]
    for epoch in range(1, epochs + 1):
        for batch in example["batches"](epoch, number):
            cut = zip(*(piece.tensor_split(4) for piece in batch), strict=True)
            losses = [F.cross_entropy(model(x.clone()), y.clone()) / 4 for x, y in cut]
            for loss in losses:
                loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return model, float(sum(losses, torch.zeros(())).detach())


@pytest.mark.distributed
def test_vision_trains_as_plain_torch_does(
    one_thread: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, ranks2: Ranks
) -> None:
    script, options = EXAMPLES / "train_vision.py", ("--epochs", "1", "--pictures", "128")
    kept: list[dict[str, torch.Tensor]] = []
    close = penstock.Pipeline.close
    with monkeypatch.context() as patch:
        patch.setattr(penstock.Pipeline, "close", lambda pipe: (kept.append(pipe.state_dict()), close(pipe))[1])
        alone = lines_here(script, *options)
    assert capsys.readouterr().err == ""
    assert ranks2.run(lines_of_rank, script, *options) == [alone, []]
    model, loss = trained_by_hand(runpy.run_path(str(script)), 1, 128)
    assert alone[0].split()[3] == f"{loss:.6f}"
    for name, value in model.named_parameters():
        assert torch.equal(kept[0][name], value), name


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("pool", "options"),
    long_after(
        *(1, ("ranks2", ["--replicas", "2"])),
        *(("ranks4", ["--replicas", "2", "--shard"]), ("ranks4", ["--replicas", "4"])),
    ),
)
def test_mesh_learns_the_same_alone_and_in_replicas(
    tmp_path: Path, request: pytest.FixtureRequest, pool: str, options: list[str]
) -> None:
    ranks: Ranks = request.getfixturevalue(pool)
    script = EXAMPLES / "train_mesh.py"
    alone = lines_here(script, "--steps", "20", "--folder", tmp_path / "alone")
    assert len(alone) == 1
    first, *others = ranks.run(lines_of_torchrun, script, "--steps", "20", "--folder", tmp_path / "split", *options)
    assert (first, others) == (alone, [[]] * (ranks.n - 1))
    if pool == "ranks2":
        return
    more = lines_here(script, "--steps", "40", "--folder", tmp_path / "alone")
    assert lines_here(script, "--steps", "40", "--folder", tmp_path / "split") == more, "from what the mesh saved"


def test_resumable_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, options = EXAMPLES / "train_resumable.py", ("--every", "4", "--steps", "8", "--folder", tmp_path / "whole")
    whole = lines_here(script, *options)
    assert [line.split()[1] for line in whole] == [str(step) for step in range(1, 9)]
    assert lines_here(script, *options) == [], "it was done"
    assert capsys.readouterr().err == ""


# -- models of transformers -------------------------------------------------------------------------------------------


LOOP = EXAMPLES / "finetune_transformers.py"
TRAINER = EXAMPLES / "finetune_trainer.py"
ACCELERATE = EXAMPLES / "finetune_accelerate.py"
BRIEF = ("--epochs", "1", "--texts", "64", "--folder")


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


def lines_of_accelerate(rank: int, script: Path, *arguments: str | Path) -> list[str]:
    AcceleratorState._reset_state(reset_partial_state=True)
    return lines_of_torchrun(rank, script, *arguments)


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.distributed
def test_loop_is_that_of_one_device(tmp_path: Path, one_thread: None, ranks2: Ranks) -> None:
    lines = lines_here(LOOP, *BRIEF, tmp_path / "alone")
    assert ranks2.run(lines_of_rank, LOOP, *BRIEF, tmp_path / "split") == [lines, []]
    expected, loss = without_penstock(runpy.run_path(str(LOOP)))
    assert lines[0].split()[3] == f"{loss:.6f}"
    alone, split = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("alone", "split"))
    assert alone.keys() == split.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(alone[name], value), name
        torch.testing.assert_close(split[name], value, rtol=0, atol=1e-5)  # the tied embedding's gradient is rounded
    assert len(AutoTokenizer.from_pretrained(tmp_path / "split")) == 160


@pytest.mark.filterwarnings("ignore")  # theirs
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
    assert ranks2.run(lines_of_accelerate, TRAINER, *short, "--resume") == [steps[2:], []]
    for name, value in AutoModelForCausalLM.from_pretrained(tmp_path / "trainer").state_dict().items():
        torch.testing.assert_close(value, whole[name], rtol=0, atol=1e-5)  # the tied embedding's gradient is rounded


@pytest.mark.filterwarnings("ignore")  # theirs
@pytest.mark.distributed
@pytest.mark.long  # like the loop
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prints_what_the_loop_prints(tmp_path: Path, ranks2: Ranks, precision: str) -> None:
    options = (*BRIEF, tmp_path / "accelerate", "--precision", precision)
    AcceleratorState._reset_state(reset_partial_state=True)
    lines = lines_here(ACCELERATE, *options)
    assert ranks2.run(lines_of_accelerate, ACCELERATE, *options) == [lines, []]
    if precision == "no":
        words = lines_here(LOOP, *BRIEF, tmp_path / "loop")[0].split()
        assert lines[0].split()[:3] == words[:3]
        shown = [float(lines[0].split()[place]) for place in (3, 6)]
        assert shown == [pytest.approx(float(words[place]), abs=1e-4) for place in (3, 6)]
