"""One file of weights: the unsplit model loads it, and a model on the meta device is made of it a stage at a time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import weights_jobs as jobs
from safetensors import safe_open
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor
from typer.testing import CliRunner

import penstock
from penstock import checkpoint
from penstock.cli import app
from scaffolding.models import TRANSFORMERS
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


def export(ranks: Ranks | None, folder: Path, **options: Any) -> dict[str, Tensor]:
    """Trains and writes; returns what all processes together held."""
    every = [jobs.export(0, folder, options)] if ranks is None else ranks.run(jobs.export, folder, options)
    return {name: tensor for part in reversed(every) for name, tensor in part.items()}


@pytest.mark.parametrize("n", [1, 4])
def test_the_unsplit_model_loads_it(ranks4: Ranks, tmp_path: Path, n: int) -> None:
    held = export({1: None, 4: ranks4}[n], tmp_path)
    path = tmp_path / "new" / "model.safetensors"
    model = jobs.Spare()
    load_model(model, path)
    state = model.state_dict()
    assert held.keys() == state.keys() - {"head.weight"}, "all but the buffer that is not persistent, each once"
    assert model.head.weight is model.embed.weight
    for name, tensor in model.state_dict().items():
        name = "embed.weight" if name == "head.weight" else name
        assert tensor.dtype == held[name].dtype
        assert torch.equal(tensor, held[name]), name
    untrained = jobs.spare()[0].state_dict()
    assert torch.equal(state["never"], untrained["never"])
    assert not torch.equal(state["last.weight"], untrained["last.weight"])
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "made": "by a test", "head.weight": "embed.weight"}
        assert "head.weight" not in file.keys()  # noqa: SIM118  (not a dict)
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_checkpoint_becomes_the_same_file(ranks2: Ranks, tmp_path: Path) -> None:
    """By a command, where there is no model."""
    export(ranks2, tmp_path)
    out = tmp_path / "of the checkpoint" / "out.safetensors"
    done = CliRunner().invoke(app, ["export", str(tmp_path / "checkpoints"), str(out)])
    assert done.exit_code == 0, done.output
    one, other = load_file(tmp_path / "new" / "model.safetensors"), load_file(out)
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    with safe_open(out, "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}
    for wrong, said in ((tmp_path / "nothing", "expected a checkpoint"), (tmp_path / "new", "expected a checkpoint")):
        done = CliRunner().invoke(app, ["export", str(wrong), str(out)])
        assert done.exit_code == 2
        assert said in done.output


@pytest.mark.parametrize(
    ("what", "how"), [("new/model.safetensors", "import"), ("checkpoints", "meta"), ("sharded", "import")]
)
def test_each_rank_reads_its_own(ranks2: Ranks, tmp_path: Path, how: str, what: str) -> None:
    held = export(None, tmp_path)
    if what == "sharded":
        shard(load_file(tmp_path / "new" / "model.safetensors"), tmp_path / what)
    every = ranks2.run(jobs.read, tmp_path / what, how)
    read = {name: tensor for part in every for name, tensor in part.items()}
    assert read.pop("shift").eq(0.5).all()
    assert read.keys() == held.keys()
    for name, tensor in read.items():
        assert torch.equal(tensor, held[name]), name
    names = ("never", "count", "embed.weight", "last.weight")
    assert [[name in part for name in names] for part in every] == [
        [True, True, True, False],
        [False, False, True, True],
    ]


def shard(state: dict[str, Tensor], folder: Path) -> None:
    """As `transformers` writes large models; the tied tensor under its other name, as it is in some files."""
    folder.mkdir()
    state["head.weight"] = state.pop("embed.weight")
    names = sorted(state)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, part in parts.items() for name in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_what_is_refused_is_refused_on_every_rank(ranks2: Ranks, tmp_path: Path) -> None:
    export(None, tmp_path)
    state = load_file(tmp_path / "new" / "model.safetensors")
    state["last.bias"] = torch.zeros(3)
    for name in ("right", "wrong", "more"):
        (tmp_path / name).mkdir()
    save_file(state, tmp_path / "wrong" / "model.safetensors")
    del state["last.bias"]
    save_file({**state, "foot": torch.zeros(3)}, tmp_path / "more" / "model.safetensors")
    (tmp_path / "new" / "model.safetensors").rename(tmp_path / "right" / "model.safetensors")
    (tmp_path / "file").write_text("")
    one, other = ranks2.run(jobs.refused, tmp_path)
    assert one == other
    for said, part in zip(
        one,
        [
            "last.bias has shape (3,) there and (19,) in the model",
            "does not fit the model (missing: last.bias; unknown to the model: foot)",
            "expected a .safetensors file, a folder with model.safetensors",
            "CheckpointError: cannot write ",
        ],
        strict=True,
    ):
        assert part in said


def test_a_first_rank_that_runs_out_of_memory_leaves_no_other_waiting(ranks2: Ranks, tmp_path: Path) -> None:
    fails = f"cannot write {tmp_path}/model.safetensors: MemoryError: none left (rank 0)"
    assert ranks2.run(jobs.export_without_memory, tmp_path) == [fails, fails]
    assert load_file(tmp_path / "model.safetensors").keys() >= {"embed.weight", "last.bias"}


@pytest.mark.parametrize("what", long_after(1, "file", "checkpoint"))
def test_a_rank_never_holds_much_more_than_its_stage(ranks4: Ranks, tmp_path: Path, what: str) -> None:
    jobs.write_deep(tmp_path)
    every = ranks4.run(jobs.load_deep, tmp_path, what)
    assert [value for values, _, _ in every for value in values] == list(range(jobs.LAYERS))
    for values, held, peak in every:
        assert len(values) == jobs.LAYERS / 4
        assert peak < 1.5 * held, (peak / held, held)


def test_transformers_reads_it(tmp_path: Path) -> None:
    """A file next to a configuration, which is what `from_pretrained` wants."""
    from transformers import GPT2LMHeadModel

    case = TRANSFORMERS["gpt2"]()
    assert isinstance(case.model, GPT2LMHeadModel)
    case.model.config.save_pretrained(tmp_path)
    with penstock.pipeline(case.model, case.args, case.kwargs, ranks=3, microbatches=2) as pipe:
        pipe.step(*case.args, **case.kwargs)
        checkpoint.export_safetensors(tmp_path / "model.safetensors", pipe)
        again, info = GPT2LMHeadModel.from_pretrained(tmp_path, output_loading_info=True)
        assert not info["missing_keys"]
        assert not info["unexpected_keys"]
        for name, tensor in pipe.model.state_dict().items():
            assert torch.equal(again.state_dict()[name], tensor), name


def test_transformers_on_the_meta_device(tmp_path: Path) -> None:
    """What the file lacks (tables that are no weights) is for the model's own initialiser to set."""
    case = TRANSFORMERS["llama"]()
    assert isinstance(case.model, torch.nn.Module)
    case.model.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = type(case.model)(case.model.config)
    rule = checkpoint.init_from_weights(tmp_path, model, init_missing=lambda name, module: model._init_weights(module))
    kwargs = {"input_ids": case.kwargs["input_ids"], "labels": case.kwargs["labels"]}
    losses = []
    for each, options in ((case.model, {}), (model, {"materialize": rule})):
        with penstock.pipeline(each, (), kwargs, ranks=2, microbatches=2, **options) as pipe:
            losses.append(float(pipe.step(**kwargs).loss))
    assert losses[0] == losses[1]
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in case.model.state_dict().items())
