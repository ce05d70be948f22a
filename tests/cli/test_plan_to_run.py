"""From `penstock plan --out` to `penstock run --plan`: real processes train as planned, to one device's gradients.

The script says nothing of the plan but what the plan's own screen tells it to.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import output
from torch import Tensor, nn

import penstock
from penstock.plan import ParallelConfig, Plan, read_plan
from penstock.plan.plan import ModelFingerprint
from scaffolding.patient import PENSTOCK, TEST_SECONDS, finished
from scaffolding.ranks import Ranks
from scaffolding.scripts import lines_here

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(TEST_SECONDS)]

MODEL = """
import torch
from torch import nn

def make():
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
    return model, torch.randn(16, 16), torch.randn(16, 16)
"""

SCRIPT = """
import os
import torch
import penstock
from model import make
torch.set_num_threads(1)
model, x, y = make()
{mesh}
with penstock.pipeline(model, (x,), loss_fn=torch.nn.functional.mse_loss{argument}) as pipe:
    pipe.step(x, target=y)
    assert not any("plan" in note for note in pipe.notes), pipe.notes
    held = {{name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}}
    torch.save((pipe.cuts, held), f"held.{{os.environ['RANK']}}.pt")
"""

SECONDS = (1, 3, 1, 2, 4, 1, 2, 2)
"""Of the model's layers, in ms; their activations are planted too, so that memory decides the plan."""


def _profile(folder: Path) -> str:
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    model, x, _ = scope["make"]()  # type: ignore[operator]
    found = penstock.profile(
        model, (x,), microbatches=16, split_inside=[], leaf_modules=[f"{n}" for n in range(8)], budget_seconds=0
    )
    units = tuple(
        replace(
            unit, forward_seconds=s * 1e-3, input_gradient_seconds=s * 1e-3, weight_gradient_seconds=s * 7e-4,
            recompute_seconds=None, spread=0.0, activation_bytes=10_000,
        )
        for unit, s in zip(found.units, SECONDS, strict=True)
    )  # fmt: skip
    replace(found, units=units, action_seconds=None, optimizer_byte_seconds=None, threads=1).save(
        folder / "profile.json"
    )
    return str(folder / "profile.json")


def _gradients_of_one_device() -> dict[str, Tensor]:
    scope: dict[str, object] = {}
    exec(MODEL, scope)
    model, x, y = scope["make"]()  # type: ignore[operator]
    for rows, targets in zip(x.split(1), y.split(1), strict=True):
        (nn.functional.mse_loss(model(rows), targets) / 16).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def follow(rank: int, script: Path, plan: Path) -> None:
    """Runs the script as `penstock run --plan` does."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("RANK", rank), ("WORLD_SIZE", 2), ("PENSTOCK_PLAN", plan)):
            patch.setenv(name, str(value))
        patch.delitem(sys.modules, "model", raising=False)
        lines_here(script)


CASES = {
    "recomputed": (2, "50KB", "0"),
    "searched": (2, "90KB", "1"),
    "recomputed replicas": (4, "50KB", "0"),
    "searched replicas": (4, "90KB", "1"),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=() if c == "recomputed" else pytest.mark.long) for c in CASES])
def test_a_plan_is_run_as_its_screen_says(
    tmp_path: Path, case: str, ranks2: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first by ranks of a pool: test_run.py shows that `penstock run` starts them so."""
    devices, memory, search = CASES[case]
    (tmp_path / "model.py").write_text(MODEL)
    file = tmp_path / "plan.json"
    screen = output(
        "plan", "--profile", _profile(tmp_path), "--devices", str(devices), "--global-batch-size", "16",
        "--memory", memory,
        "--schedule", "interleaved-1f1b", "--link", "10gbit delay 50us", "--search-time", search, "--out", str(file),
    )  # fmt: skip
    plan = read_plan(file)
    assert (plan.choice.replicas, plan.choice.ranks) == (devices // 2, 2)
    assert (bool(plan.recompute), bool(plan.order)) == ("recomputed" in case, "searched" in case)
    told = screen.partition(f"written to {file}")[2].splitlines()[1:]
    lines = [line.strip() for line in told[:-1]]  # the last one calls the pipeline
    (tmp_path / "train.py").write_text(
        SCRIPT.format(mesh="\n".join(lines), argument=", mesh=mesh" if "mesh=mesh" in told[-1:] or lines else "")
    )
    if case == "recomputed":
        monkeypatch.chdir(tmp_path)
        ranks2.run(follow, tmp_path / "train.py", file)
    else:
        done = finished(*PENSTOCK, "run", "--plan", file, "train.py", folder=tmp_path)
        assert done.returncode == 0, done.stderr
    parts = [torch.load(tmp_path / f"held.{rank}.pt") for rank in range(devices)]
    assert all(cuts == plan.cuts for cuts, _ in parts)
    one = _gradients_of_one_device()
    assert {name for _, held in parts for name in held} == one.keys()
    for _, held in parts:
        for name, grad in held.items():
            if devices == 2:
                assert torch.equal(grad, one[name]), name
            else:
                assert (grad - one[name]).abs().max() <= 1e-6 * one[name].abs().max(), name


@pytest.mark.long  # what does not fit: test_planned.py; a line for a rank that raises: test_verify.py
def test_a_script_that_cannot_follow_the_plan_gets_one_line(tmp_path: Path) -> None:
    plan = Plan(ParallelConfig(1, 2, 1, "1f1b", 2, 8), ("4",), (), (1.0, 1.0), 3.0, 0.0, {}, (1.0, 1.0), (2.0, 2.0))
    replace(plan, made_for=ModelFingerprint({"0.weight": (3, 3)}, "cpu", "float32")).save(tmp_path / "plan.json")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "train.py").write_text(SCRIPT.format(mesh="", argument=""))
    done = finished(*PENSTOCK, "run", "--plan", tmp_path / "plan.json", "train.py", folder=tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("penstock: plan= is not for this model on this device: ")
