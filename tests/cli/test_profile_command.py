"""`penstock profile` prints what units cost, and leaves a file that others cut by."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import as_json, output, refusal
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, Microbatch, Profile
from penstock.cli.profile import summarize_units
from penstock.costs import UnitCost, read_profile
from penstock.costs.sizes import quality_warnings
from penstock.plan import Sizes

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


def test_a_profile_of_a_busy_machine_says_so() -> None:
    def sized(rows: int, seconds: float, spread: float = 0.0) -> Profile:
        unit = UnitCost("a", seconds, 0.0, 0.0, spread=spread)
        return Profile((unit,), "cpu", "float32", {}, rows=rows)

    assert quality_warnings(sized(4, 2.0, spread=0.2).with_others([sized(1, 1.0)])) == ()
    (varies,) = quality_warnings(sized(4, 2.0, spread=0.3))
    assert "times vary by 30% from run to run" in varies
    slow = sized(4, 2.0)
    slow = replace(slow, units=tuple(replace(u, split_forward_seconds=5 * u.forward_seconds) for u in slow.units))
    (differs,) = quality_warnings(slow)
    assert "where backwards are split" in differs
    (shrinks,) = quality_warnings(sized(4, 2.0).with_others([sized(2, 3.0), sized(1, 1.0)]))
    assert "microbatches of 4 rows took less time than those of 2" in shrinks
    assert quality_warnings(replace(sized(4, 2.0, spread=0.3), source="estimate")) == ()


def test_a_long_table_has_a_row_for_each_module() -> None:
    """Repeated units of one kind have one row as long as all rows fit."""

    def unit(name: str, like: str = "") -> UnitCost:
        return UnitCost(name, 1.0, 1.0, 1.0, 1, 1, 1, 1, like=like)

    units = [unit("stem"), *(unit(f"blocks.{b}.{part}") for b in range(3) for part in ("conv", "norm")), unit("head.0")]
    assert summarize_units(units) == [(one.name, [one]) for one in units]

    def rows(units: list[UnitCost], **options: int) -> dict[str, int]:
        return {name: len(row) for name, row in summarize_units(units, **options)}

    blocks = {f"blocks.{b}.*": 2 for b in range(3)}
    assert rows(units, max_rows=5) == {"stem": 1, **blocks, "head.0": 1}
    assert rows(units, max_rows=3) == {"stem": 1, "blocks.*": 6, "head.0": 1}
    alike = [unit("blocks.0"), unit("blocks.1", "blocks.0"), unit("blocks.2", "blocks.0"), unit("head")]
    assert rows(alike) == {"blocks.0-2": 3, "head": 1}


def test_a_table_and_a_file_to_cut_by() -> None:
    command = ("profile", "cases.py:make", "--microbatches", "2", "--time-limit", "0.1", "--out", "profile.json")
    lines = output(*command).splitlines()
    lines = [line for line in lines if not line.startswith("note: ")]  # a busy machine has some
    assert lines[0].startswith("6 units on ")
    assert lines[1] == "for one microbatch: args[0] float32[4, 7]"
    *rows, above, split, below, written = lines[4:]
    assert [line.split()[0] for line in rows] == ["0", "1-4", "5", "total"]
    assert (above, below) == ("", "")
    assert re.fullmatch(r"split backwards, all units: F [0-9.]+, I [0-9.]+, W [0-9.]+ ms", split)
    assert written.startswith("written to profile.json: ")
    profile = Profile.from_dict(json.loads(Path("profile.json").read_text()))
    assert [unit.name for unit in profile.units] == list("012345")
    found = json.loads(output("inspect", "cases.py:make", "--balance", "profile.json", "--json"))
    assert found["stages"][1]["first_module"] in tuple("12345")


def test_what_cannot_be_measured_is_refused() -> None:
    assert "the model cannot be profiled: its weights are on the meta device" in refusal("profile", "cases.py:meta")
    assert refusal("profile", "cases.py:make", "--time-limit", "-1") == "--time-limit -1: expected seconds, 0 or more"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a device to measure on")
def test_a_device_that_torch_does_not_have_here_is_refused() -> None:
    says = refusal("profile", "cases.py:make", "--device", "cuda")
    assert says.startswith("--device cuda: torch cannot compute there: ")


def test_it_measures_with_the_threads_that_a_rank_will_have(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    output("profile", "cases.py:make", "--time-limit", "0", "--threads", "3")
    assert asked[0] == 3  # on a busy machine it measures on one, too


def test_microbatches_of_several_sizes_in_one_file() -> None:
    text = output("profile", "cases.py:make", "--microbatch-sizes", "1,5,2", "--out", "p.json", "--time-limit", "0")
    assert text.splitlines()[1] == "for one microbatch: args[0] float32[5, 7]"
    sizes = text.partition("by microbatch size\n")[2].splitlines()
    assert [line.split()[0] for line in sizes[1:4]] == ["1", "2", "5"]
    found = read_profile("p.json")
    assert [(one.rows, one.inputs["args[0]"]) for one in found.each_size] == [
        (rows, f"float32[{rows}, 7]") for rows in (1, 2, 5)
    ]
    assert [sum(u.activation_bytes for u in one.units) for one in found.each_size] == [
        4 * r * (7 + 45) for r in (1, 2, 5)
    ]
    assert found == Profile.from_dict(json.loads(json.dumps(found.to_dict())))
    rows = {one["choice"]["rows"] for one in plans("p.json")}
    assert {1, 2, 4, 8} <= rows


def plans(*files: str) -> list[Any]:
    """All that `penstock plan` weighs for two devices."""
    options = [option for file in files for option in ("--profile", file)]
    found = as_json("plan", "--devices", "2", "--global-batch-size", "16", *options)
    return [*found["plans"], *found["lost"]]


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("9", "--microbatch-sizes 9: the batch has only 8 rows: pass a larger one, or microbatches of at most 8"),
        ("1,two", "--microbatch-sizes 1,two: expected comma-separated integers, as in 1,2,4"),
        ("0,1", "--microbatch-sizes 0,1: expected numbers of rows, each >= 1"),
    ],
)
def test_sizes_that_the_batch_does_not_make_are_refused(sizes: str, message: str) -> None:
    assert refusal("profile", "cases.py:make", "--microbatch-sizes", sizes) == message
    assert "says the size too" in refusal("profile", "cases.py:make", "--microbatch-sizes", "1", "--microbatches", "2")


def test_rows_are_those_of_the_batch_s_own_dimension() -> None:
    """A plan for microbatches of 3 rows, not of the 7 steps of time that come first."""
    model = nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 3))
    found = penstock.profile(model, (torch.randn(7, 6, 5),), microbatches=2, batch_dims=1, budget_seconds=0.0)
    assert (found.rows, found.inputs) == (3, {"args[0]": "float32[7, 3, 5]"})
    assert list(Sizes.of([found]).profiles) == [3]
    sizes = penstock.profile(model, (torch.randn(7, 6, 5),), microbatch_sizes=[4, 1], batch_dims=1, budget_seconds=0.0)
    assert {rows: one.inputs["args[0]"] for rows, one in Sizes.of([sizes]).profiles.items()} == {
        1: "float32[7, 1, 5]",
        4: "float32[7, 4, 5]",
    }


def test_memory_and_the_link_between_ranks_move_cuts() -> None:
    output("profile", "cases.py:make", "--microbatches", "2", "--time-limit", "0", "--out", "profile.json")
    found = read_profile("profile.json")
    costs = {"forward_seconds": 1.0, "input_gradient_seconds": 0.0, "weight_gradient_seconds": 0.0}
    sent = {"boundary_bytes": 1000, "boundary_gradient_bytes": 0}
    even = [replace(unit, **costs, **(sent if unit.name == "3" else {})) for unit in found.units]
    replace(found, units=tuple(even)).save("profile.json")
    command = ("inspect", "cases.py:make", "--balance", "profile.json", "--microbatches", "2")
    for options, begins in (((), True), (("--link", "1kbit"), False), (("--memory-limit", "8KiB"), True)):
        assert (as_json(*command, *options)["stages"][1]["first_module"] == "3") is begins
    least = refusal(*command, "--memory-limit", "1KiB")
    assert least.startswith("--memory-limit 1,024 bytes: no cut into 2 stages fits. The best one needs ")


def test_an_estimate_for_a_device_that_is_not_here() -> None:
    lines = output("profile", "cases.py:meta", "--device", "h100", "--out", "estimate.json").splitlines()
    assert lines[0] == "2 units on NVIDIA H100 SXM 80GB, an estimate"
    assert lines[-3].startswith("note: not measured: an estimate from NVIDIA H100 SXM 80GB's specifications: 70% of")
    found = read_profile("estimate.json")
    assert (found.source, found.device, found.rows) == ("estimate", "cuda", 1)
    assert all(unit.seconds > 0 for unit in found.units)
    for unused in (("--threads", "3"), ("--time-limit", "9")):
        says = refusal("profile", "cases.py:make", "--device", "h100", *unused)
        assert f"{' '.join(unused)}: an estimate (--device h100) measures nothing; omit it" in says
    assert "device 'h10': not known; did you mean 'h100'" in refusal("profile", "cases.py:make", "--device", "h10")


MINE = """
[mine]
type = "cpu"
tflops = { float32 = 0.1 }
memory_gb = 8
bandwidth_gbps = 20
"""


def test_an_estimate_is_calibrated_by_what_was_measured() -> None:
    Path("mine.toml").write_text(MINE)
    output("profile", "cases.py:make", "--time-limit", "0", "--out", "here.json")
    lines = output("profile", "cases.py:meta", "--device", "mine.toml", "--calibrate", "here.json").splitlines()
    assert lines[0] == "2 units on mine, an estimate"
    assert "fitted to 8 measurements (median error " in lines[-1]
    assert "--calibrate is for estimates: name what to estimate for" in refusal(
        "profile", "cases.py:make", "--calibrate", "here.json"
    )
    assert "was measured on" in refusal("profile", "cases.py:make", "--device", "h100", "--calibrate", "here.json")


def test_devices_are_listed_with_their_sources() -> None:
    text = output("devices")
    assert "h100-sxm" in text
    assert "NVIDIA H100 datasheet" in text
    (found,) = json.loads(output("devices", "a100", "--json"))
    assert (found["key"], found["flops_per_second"]["bfloat16"]) == ("a100-sxm-80gb", 312e12)


def test_cuts_by_an_estimate_say_so() -> None:
    Path("mine.toml").write_text(MINE)
    output("profile", "cases.py:make", "--device", "mine.toml", "--out", "estimate.json")
    text = output("inspect", "cases.py:make", "--balance", "estimate.json")
    assert "stages are cut by an estimate for mine, not by measured times" in text


def test_sizes_of_a_batch_that_is_cut_by_a_function() -> None:
    def halves(args: tuple[Tensor], kwargs: dict[str, Any], target: Any, microbatches: int) -> list[Microbatch]:
        return [Microbatch((piece,)) for piece in args[0].chunk(min(microbatches, 2))]

    model, x = nn.Sequential(nn.Linear(7, 9), nn.Linear(9, 3)), torch.randn(8, 7)
    found = penstock.profile(model, (x,), microbatch_sizes=[8, 4], split_fn=halves, budget_seconds=0.0)
    assert [one.rows for one in found.each_size] == [4, 8]
    assert found.parameters == {"0.weight": (9, 7), "0.bias": (9,), "1.weight": (3, 9), "1.bias": (3,)}
    assert (found.device, found.dtype, found.source, found.runs) == ("cpu", "float32", "measured", 1)
    for options, said in (
        ({"budget_seconds": "1"}, "budget_seconds='1'"),
        ({"microbatch_sizes": [2], "split_fn": halves}, r"microbatch_sizes=\[2\]: no microbatch has 2 rows: .* of 4"),
    ):
        with pytest.raises(ArgumentError, match=said):
            penstock.profile(model, (x,), **options)
