"""`penstock inspect`: what it says of a model is what the pipeline makes of it; of a failure, where and what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import as_json, output, refusal
from torch import nn

import penstock
from penstock import ArgumentError
from penstock.costs import read_profile
from scaffolding import models

TARGETS = """
import torch
from scaffolding import models
from torch import nn

def of(case):
    return case.model, (case.args, case.kwargs), case.target, case.loss

def gpt(): return of(models.gpt(dropout=0.1))
def skips(): return of(models.skips())
def convnet(): return of(models.convnet())
def t5(): return of(models.t5())

def frozen():
    case = models.mlp()
    case.model[0].requires_grad_(False)
    return of(case)

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(7, 7), nn.Linear(7, 3)
    def forward(self, x):
        x = self.one(x)
        if x.sum() > 0:
            x = x + 1
        return self.two(x)

def branches():
    return Branches(), *of(models.mlp())[1:]

class Around(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.last = Branches(), nn.Linear(3, 3)
    def forward(self, x):
        return self.last(self.inner(x))

def branches_inside():
    return Around(), *of(models.mlp())[1:]

def broken():
    return nn.Linear(3, 3), *of(models.mlp())[1:]
"""


@pytest.fixture
def targets(tmp_path: Path) -> str:
    file = tmp_path / "targets.py"
    file.write_text(TARGETS)
    return str(file)


def test_stages_cuts_and_ties_are_those_of_the_pipeline(targets: str) -> None:
    found = as_json("inspect", f"{targets}:gpt", "-n", "3")
    case = models.gpt(dropout=0.1)
    pipe = penstock.pipeline(case.model, case.args, case.kwargs, loss=case.loss, ranks=3, microbatches=1)
    assert tuple(stage["first_module"] for stage in found["stages"]) == ("", *pipe.cuts)
    pipe.close()
    own = dict(case.model.named_parameters())
    assert found["parameters"] == sum(p.numel() for p in own.values())
    (tie,) = found["ties"]
    assert tie["name"] in own
    assert tie["stages"] == [0, 2]
    assert tie["parameters"] == own[tie["name"]].numel()
    assert sum(stage["parameters"] for stage in found["stages"]) == found["parameters"] + tie["parameters"]
    shares = [stage["parameter_fraction"] for stage in found["stages"]]
    assert sum(shares) == pytest.approx(1), "a tied parameter counts on the first of its stages alone"
    first = {name: p.numel() for name, p in own.items() if name in pipe.stages[0].parameters}
    assert shares[0] == pytest.approx(sum(first.values()) / found["parameters"])
    assert sum(stage["work_fraction"] for stage in found["stages"]) == pytest.approx(1)
    assert all(stage["random_modules"] for stage in found["stages"])
    assert all(stage["modules"] and stage["activation_bytes"] > 0 for stage in found["stages"])


def test_gradients_have_the_bytes_of_the_dtype_in_which_they_accumulate() -> None:
    model = nn.Sequential(*(nn.Linear(4, 4, dtype=torch.bfloat16) for _ in range(3)))
    model[0].weight.requires_grad_(False)
    model[1].bias.grad_dtype = torch.float64
    for asked, size in ((None, 2), (torch.float32, 4)):
        found = penstock.inspect(model, (torch.ones(2, 4).bfloat16(),), stages=3, microbatches=2, grad_dtype=asked)
        assert [stage.gradient_bytes for stage in found.stages] == [size * 4, size * 16 + 8 * 4, size * 20]
        assert [stage.parameter_bytes for stage in found.stages] == [2 * 20] * 3
    assert model[2].weight.grad_dtype == torch.bfloat16, "only a pipeline sets it"
    with pytest.raises(ArgumentError, match=r"grad_dtype=torch\.float16"):
        penstock.inspect(model, (torch.ones(2, 4).bfloat16(),), grad_dtype=torch.float16)


def test_what_crosses_has_a_shape_a_size_and_a_maker(targets: str) -> None:
    asked = ("inspect", f"{targets}:gpt", "-n", "2", "--microbatches", "1")
    found, wide = as_json(*asked), as_json(*asked, "--grad-dtype", "float64")
    for stage, other in zip(found["stages"], wide["stages"], strict=True):
        assert (other["gradient_bytes"], other["parameter_bytes"]) == (8 * stage["parameters"], 4 * stage["parameters"])
    (one,) = found["crossings"]
    batch, length = models.gpt().args[0].shape
    width = one["shape"][-1]
    assert one["shape"] == [batch, length, width]
    assert one["bytes"] == 4 * batch * length * width
    assert one["requires_grad"]
    assert isinstance(models.gpt().model.get_submodule(one["module"]), nn.Module)
    assert one["source_line"] == ""


def test_skips_and_inputs_that_pass_are_told_apart(targets: str) -> None:
    found = as_json("inspect", f"{targets}:skips", "-n", "4")
    assert any(crossing["target"] - crossing["source"] > 1 for crossing in found["crossings"])
    assert "skips" in output("inspect", f"{targets}:skips", "-n", "4", columns=120)
    text = output("inspect", f"{targets}:t5", "-n", "3", columns=120)
    assert "tied: shared.weight on stages 0, 1, 2" in text
    assert "no gradient" in text
    assert "encoder." in text


def test_buffers_and_frozen_stages_are_named(targets: str) -> None:
    assert "updates" in output("inspect", f"{targets}:convnet")
    text = output("inspect", f"{targets}:frozen", "--cuts", "2")
    assert "stage 0 takes no gradient: its parameters are frozen" in text


def test_a_failure_names_the_line_and_the_remedy(targets: str) -> None:
    said = refusal("inspect", f"{targets}:branches")
    line = TARGETS.splitlines().index("        if x.sum() > 0:") + 1
    assert f"targets.py:{line}: `if x.sum() > 0:`" in said
    assert "Do it outside of the model" in said
    inside = refusal("inspect", f"{targets}:branches_inside")
    assert f"targets.py:{line}: `if x.sum() > 0:` in module 'inner'" in inside
    assert "Pass --leaf-modules inner, so that it runs as a whole (tried: " in inside
    output("inspect", f"{targets}:branches_inside", "--leaf-modules", "inner")
    assert "raised RuntimeError" in refusal("inspect", f"{targets}:broken")
    assert "--stages 0: expected an integer >= 1" in refusal("inspect", f"{targets}:gpt", "-n", "0")
    assert "'nowhere'" in refusal("inspect", f"{targets}:gpt", "--cuts", "nowhere")


def test_stages_show_the_times_by_which_they_are_cut(targets: str, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    output("profile", f"{targets}:gpt", "--time-limit", "0", "--microbatches", "8", "--out", str(file))
    stages = as_json("inspect", f"{targets}:gpt", "-n", "2", "--balance", str(file))["stages"]
    assert sum(stage["seconds"] for stage in stages) >= 0.99 * sum(unit.seconds for unit in read_profile(file).units)
    lines = output("inspect", f"{targets}:gpt", "-n", "2", "--balance", str(file)).splitlines()
    assert [line.split()[:6] for line in lines if "first module" in line] == [
        ["stage", "first", "module", "est.", "cost", "ms"]
    ]
    assert all(stage["seconds"] is None for stage in as_json("inspect", f"{targets}:gpt", "-n", "2")["stages"])
