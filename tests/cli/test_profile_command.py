"""`penstock profile` prints what units cost, and leaves a file that others cut by."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from command_line import output, refusal
from torch import nn

import penstock
from penstock import ArgumentError, Profile

TARGETS = """
import torch
from torch import nn

def make():
    model = nn.Sequential(nn.Linear(7, 9), *(nn.Linear(9, 9) for _ in range(4)), nn.Linear(9, 3))
    return model, (torch.randn(8, 7),), torch.randn(8, 3), nn.functional.mse_loss

def meta():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    return model, (torch.randn(8, 7),), None, None
"""


@pytest.fixture(autouse=True)
def _targets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)


def test_a_table_and_a_file_to_cut_by() -> None:
    lines = output("profile", "cases.py:make", "--microbatches", "2", "--json", "profile.json").splitlines()
    assert lines[0].startswith("6 units on ")
    assert lines[1] == "for one microbatch: args[0] float32[4, 7]"
    assert [line.split()[0] for line in lines[4:]] == ["0", "1-4", "5"]
    profile = Profile.from_dict(json.loads(Path("profile.json").read_text()))
    assert [unit.name for unit in profile.units] == list("012345")
    found = json.loads(output("inspect", "cases.py:make", "--balance", "profile.json", "--json"))
    assert found["stages"][1]["begins"] in tuple("12345")


def test_what_cannot_be_measured_is_refused() -> None:
    assert "the model cannot be profiled: its weights are on the meta device" in refusal("profile", "cases.py:meta")
    assert (
        refusal("profile", "cases.py:make", "--budget-seconds", "-1")
        == "--budget-seconds -1: expected seconds, 0 or more"
    )


def test_from_python() -> None:
    model = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3))
    found = penstock.profile(model, (torch.randn(8, 7),), microbatches=4, budget_seconds=0.0)
    assert found.inputs == {"args[0]": "float32[2, 7]"}
    assert found.parameters == {"0.weight": (9, 7), "0.bias": (9,), "1.weight": (3, 9), "1.bias": (3,)}
    assert (found.device, found.dtype, found.source, found.runs) == ("cpu", "float32", "measured", 1)
    for options, words in (({"microbatches": 0}, "microbatches=0"), ({"budget_seconds": "1"}, "budget_seconds='1'")):
        with pytest.raises(ArgumentError, match=words):
            penstock.profile(model, (torch.randn(8, 7),), **options)


def test_blocks_that_a_module_holds_are_opened_and_a_pipeline_opens_them_too() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.layer(x)

    class Level(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block(), Block())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.levels = nn.ModuleList([Level(), Level()])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for level in self.levels:
                x = level(x)
            return x

    x = torch.randn(4, 8)
    found = penstock.profile(Whole(), (x,), budget_seconds=0.0)
    assert [unit.name for unit in found.units] == [f"levels.{i}.blocks.{j}" for i in range(2) for j in range(3)]
    with penstock.pipeline(Whole(), (x,), ranks=2, microbatches=2, loss_fn=lambda y: y.mean(), balance=found) as pipe:
        assert pipe.cuts[0] in {unit.name for unit in found.units}


def test_memory_and_the_link_between_ranks_move_cuts() -> None:
    output("profile", "cases.py:make", "--microbatches", "2", "--json", "profile.json")
    found = Profile.from_dict(json.loads(Path("profile.json").read_text()))
    costs = {"forward_seconds": 1.0, "input_gradient_seconds": 0.0, "weight_gradient_seconds": 0.0}
    sent = {"boundary_bytes": 1000, "boundary_gradient_bytes": 0}
    even = [replace(unit, **costs, **(sent if unit.name == "3" else {})) for unit in found.units]
    replace(found, units=tuple(even)).save("profile.json")

    def begins(command: str, *options: str) -> str:
        done = output(command, "cases.py:make", "--balance", "profile.json", "--microbatches", "2", "--json", *options)
        report = json.loads(done)
        if command == "inspect":
            return str(report["stages"][1]["begins"])
        return min(row["name"][0] for row in report["rows"] if row["kind"] == "gradient" and row["stages"] == [1])

    for command in ("inspect", "verify"):
        assert begins(command) == "3"
        assert begins(command, "--link", "1kbit") != "3"
        assert begins(command, "--memory-limit", "5KiB") == "3"
        least = refusal(command, "cases.py:make", "--memory-limit", "1KiB", "--balance", "profile.json")
        assert least.startswith("--memory-limit 1,024 bytes: no cut into 2 stages fits. The least that any needs is ")
