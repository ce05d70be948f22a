"""The programs in `examples/` run, and give the same figures alone and in processes."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import penstock
from penstock.cli import app
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.scripts import lines_here, lines_of_rank

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


def lines_of_process(rank: int, script: Path, *arguments: str | Path) -> list[str]:
    """What a rank of a pool prints that is told, as torchrun does, how many there are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", str(dist.get_world_size()))
        return lines_of_rank(rank, script, *arguments)


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
    first, *others = ranks.run(lines_of_process, script, "--steps", "20", "--folder", tmp_path / "split", *options)
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
