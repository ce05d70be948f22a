"""`simulate`, `show` and `search` take a profile, or a model to measure, in place of costs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from command_line import as_json, output, refusal

import penstock
from penstock.costs import MeasuredLink, Profile, UnitCost
from penstock.distributed.launch.target import load
from penstock.schedule import generate, read_csv
from penstock.simulate import LinkCost, StageCost, memory, simulate

SECONDS = (1.0, 5.0, 2.0, 3.0, 4.0, 9.0)
UNITS = tuple(
    UnitCost(str(i), s, s / 2, s / 4, 10 * i, 100 + i, 100 + i, 200 + 2 * i, 40 * i, 40 * i)
    for i, s in enumerate(SECONDS)
)
PARAMETERS = {f"{i}.{name}": shape for i in range(6) for name, shape in (("weight", (8, 8)), ("bias", (8,)))}
PROFILE = Profile(UNITS, "cpu", "float32", PARAMETERS, inputs={"args[0]": "float32[2, 8]"}, rows=2)

LINK = LinkCost(30e-6, 5e9)
TAKEN = "links not measured: assuming 30 us latency and 5 GB/s"
"""What a plan assumes for ranks on CPUs, too."""

TARGETS = """
import torch
from torch import nn

def make(dtype=torch.float32, width=8):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(6))).to(dtype)
    return model, (torch.randn(16, width, dtype=dtype),), None, None

def wide():
    return make(width=9)

def double():
    return make(torch.float64)

def elsewhere():
    model, (x,), *rest = make()
    return model, (x.to("meta"),), *rest
"""


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cases.py").write_text(TARGETS)
    monkeypatch.chdir(tmp_path)
    PROFILE.save("p.json")


SPLIT = tuple(
    replace(
        unit,
        split_forward_seconds=2.0 * unit.forward_seconds,
        split_input_gradient_seconds=3.0 * unit.input_gradient_seconds,
        split_weight_gradient_seconds=5.0 * unit.weight_gradient_seconds,
    )
    for unit in UNITS
)
"""The same units, slower where the backward is split."""


def best_cuts(stages: int) -> tuple[int, ...]:
    """Tries all: what crosses takes next to nothing here, so that only the slowest stage matters, then the squares."""

    def loads(cuts: tuple[int, ...]) -> list[float]:
        return [sum(SECONDS[a:b]) for a, b in pairwise((0, *cuts, 6))]

    every = combinations(range(1, 6), stages - 1)
    return min(every, key=lambda cuts: (max(loads(cuts)), sum(load**2 for load in loads(cuts))))


def by_hand(stages: int) -> list[StageCost]:
    """What the stages cost."""
    found = []
    for a, b in pairwise((0, *best_cuts(stages), 6)):
        work, kept, held = sum(SECONDS[a:b]), sum(10 * i for i in range(a, b)), sum(100 + i for i in range(a, b))
        sent = 40 * b if b < 6 else 0
        found.append(StageCost(work, work / 2, work / 4, sent, kept, kept, held, held, 2 * held))
    return found


@pytest.mark.parametrize(
    ("name", "ranks", "stages"), [("1f1b", 3, 3), ("zb-h1", 2, 2), ("zb-v", 2, 4), ("gpipe", 1, 1)]
)
def test_a_profile_is_cut_into_the_schedule_s_stages(name: str, ranks: int, stages: int) -> None:
    found = as_json("simulate", "--profile", "p.json", "--schedule", name, "-n", str(ranks), "--microbatches", "4")
    schedule, costs = generate(name, ranks, 4), by_hand(stages)
    timeline = simulate(schedule, costs, LINK)
    assert found["makespan"] == pytest.approx(timeline.makespan_seconds)
    assert found["cuts"] == [str(cut) for cut in best_cuts(stages)]
    assert [line["peak"] for line in found["memory"]] == [one.peak for one in memory(schedule, costs, timeline)]


def test_the_table_says_where_costs_come_from_and_its_units() -> None:
    lines = output("simulate", "--profile", "p.json", "--schedule", "1f1b", "-n", "2", columns=200).splitlines()
    assert lines[2].split()[0] == "makespan"
    assert lines[2].endswith(" s")
    cut = best_cuts(2)[0]
    assert f"costs          p.json, measured on cpu, microbatches of 2 rows; {TAKEN}; stages begin at {cut}" in lines
    assert any(line.endswith(" kB") for line in lines)


def test_several_schedules_and_a_sweep_cut_for_each() -> None:
    found = as_json("simulate", "--profile", "p.json", "--schedule", "1f1b,zb-v", "-n", "2", "--microbatches", "4")
    spans = {one["name"]: one["span"] for one in found["schedules"]}
    assert spans["zb-v"] == pytest.approx(simulate(generate("zb-v", 2, 4), by_hand(4), LINK).span_seconds)
    swept = as_json("simulate", "--profile", "p.json", "--schedule", "1f1b", "-n", "1,3,8", "--microbatches", "4,5")
    for cell in swept["sweep"]:
        alone = cell["microbatches"] * 1.75 * sum(SECONDS)
        whole = simulate(generate("1f1b", cell["ranks"], cell["microbatches"]), by_hand(cell["ranks"]), LINK)
        assert cell["speedup"] == pytest.approx(alone / whole.makespan_seconds)
    assert [(one["ranks"], "has 6 units" in one["reason"]) for one in swept["not_allowed"]] == [(8, True)] * 2
    text = output("simulate", "--profile", "p.json", "--schedule", "1f1b", "-n", "1,2", columns=200)
    assert f"p.json, measured on cpu, microbatches of 2 rows; {TAKEN}, cut for each schedule" in text


def test_rows_between_measured_sizes() -> None:
    double = replace(
        PROFILE, rows=6, units=tuple(replace(unit, forward_seconds=3 * unit.forward_seconds) for unit in UNITS)
    )
    PROFILE.with_others([double]).save("two.json")
    command = ("simulate", "--profile", "two.json", "--schedule", "gpipe", "-n", "1", "--microbatches", "1")
    at = {rows: as_json(*command, "--microbatch-size", str(rows))["makespan"] for rows in (2, 4, 6)}
    assert at == {rows: pytest.approx(sum(SECONDS) * (0.75 + rows / 2)) for rows in (2, 4, 6)}
    assert "4 rows (between those measured: 2, 6)" in output(*command, "--microbatch-size", "4", columns=200)
    assert "9 rows (beyond those measured: 2, 6)" in output(*command, "--microbatch-size", "9", columns=200)
    assert refusal(*command, "--microbatch-size", "13").startswith(
        "--microbatch-size 13: --profile two.json has microbatches of 2, 6 rows, which cover 1 to 12"
    )


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_plan_simulate_and_explain_have_one_price_list(name: str) -> None:
    """A simulated run takes what a plan says, and is explained as exactly what its profile predicts."""
    slow = 0.25  # what the runtime adds to an action
    replace(PROFILE, units=SPLIT, action_seconds=slow).save("slow.json")
    known = ("--profile", "slow.json")
    took = as_json("simulate", *known, "--schedule", name, "-n", "2", "--microbatches", "4", "--perfetto", "run.json")
    bare = replace(PROFILE, units=SPLIT)
    bare.save("bare.json")
    command = ("simulate", "--profile", "bare.json", "--schedule", name, "-n", "2", "--microbatches", "4")
    assert took["makespan"] >= as_json(*command)["makespan"] + 4 * 2 * slow
    plans = as_json(
        "plan", *known, "--devices", "2", "--global-batch-size", "8", "--schedule", name, "--search-time", "0"
    )["plans"]
    (plan,) = (one for one in plans if one["choice"]["microbatches"] == 4 and one["choice"]["ranks"] == 2)
    assert plan["pipeline_seconds"] == pytest.approx(took["makespan"], rel=1e-9)
    assert plan["cuts"] == took["cuts"]
    explained = as_json("explain", "run.json", *known)
    assert explained["predicted_seconds"] == pytest.approx(took["makespan"], rel=1e-6)
    predicted = [stage["predicted_seconds"] for stage in explained["stages"]]
    assert predicted == pytest.approx(plan["stage_seconds"], rel=1e-9)
    assert output("report", "run.json", *known, "--out", "run.html").startswith("wrote")


def test_show_and_search_take_it_too() -> None:
    drawn = output("draw", "--profile", "p.json", "--schedule", "1f1b", "-n", "2", columns=200)
    assert f"stages begin at {best_cuts(2)[0]}" in drawn
    command = ("search", "--profile", "p.json", "-n", "3", "--microbatches", "4", "--time-limit", "0.2")
    found = as_json(*command, "--out", "found.csv")
    assert found["cuts"] == [str(cut) for cut in best_cuts(3)]
    again = simulate(read_csv("found.csv"), by_hand(3), LINK)
    assert found["makespan"] == pytest.approx(again.makespan_seconds)
    assert as_json("simulate", "--profile", "p.json", "--csv", "found.csv")["makespan"] == found["makespan"]


def test_messages_take_what_the_profile_measured_unless_options_say_otherwise() -> None:
    links = (MeasuredLink(0, 1, 0.5, 100.0), MeasuredLink(1, 0, 0.25, None))
    replace(PROFILE, links=links).save("links.json")
    command = ("simulate", "--profile", "links.json", "--schedule", "1f1b", "-n", "2", "--microbatches", "3")
    found = as_json(*command)["makespan"]
    known = {(0, 1): LinkCost(0.5, 100.0), (1, 0): LinkCost(0.25)}
    schedule = generate("1f1b", 2, 3)
    assert found == pytest.approx(simulate(schedule, by_hand(2), known).makespan_seconds)
    slow = as_json(*command, "--link-latency", "3")["makespan"]
    assert slow == pytest.approx(simulate(schedule, by_hand(2), LinkCost(3.0)).makespan_seconds)


def test_a_target_is_measured_and_cut() -> None:
    found = as_json("simulate", "cases.py:make", "--schedule", "1f1b", "-n", "3", "--microbatches", "4")
    assert len(found["cuts"]) == 3 - 1
    assert sum(line["parameters"] for line in found["memory"]) == 6 * 4 * 72
    assert "cases.py:make, measured on " in found["costs"]
    assert "microbatches of 4 rows" in found["costs"]
    assert "microbatches of 5 rows" in output(
        "draw", "cases.py:make", "--schedule", "1f1b", "-n", "2", "--microbatch-size", "5", columns=200
    )


def test_stages_begin_where_a_pipeline_with_this_profile_cuts() -> None:
    given = load("cases.py:make")
    with penstock.pipeline(
        given.model, given.args, ranks=3, microbatches=8, loss_fn=lambda y: y.mean(), balance=PROFILE
    ) as pipe:
        found = as_json("simulate", "cases.py:make", "--profile", "p.json", "--schedule", "1f1b", "-n", "3")
        assert list(pipe.cuts) == found["cuts"]


@pytest.mark.parametrize(
    ("target", "difference"),
    [
        ("wide", "its '0.weight' is [8, 8], and the model's [9, 9]"),
        ("double", "it was made for dtype 'float32', and this is 'float64'"),
        ("elsewhere", "it was made for device 'cpu', and this is 'meta'"),
    ],
)
def test_a_profile_of_something_else_than_the_target_is_refused(target: str, difference: str) -> None:
    message = refusal("simulate", f"cases.py:{target}", "--profile", "p.json", "--schedule", "1f1b", "-n", "2")
    assert message.startswith(f"--profile p.json is not of this model on this device: {difference}. Make one with")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--profile", "p.json", "--forward", "2"), "--profile p.json already sets what --forward would"),
        (("cases.py:make", "--output-bytes", "2"), "cases.py:make already sets what --output-bytes would"),
        (("--profile", "p.json", "--costs", "c.json"), "--costs c.json already sets what --profile p.json would"),
        (
            ("--profile", "p.json", "--microbatch-size", "0"),
            "--microbatch-size 0: --profile p.json has microbatches of 2 rows",
        ),
        (("--microbatch-size", "2"), "--microbatch-size 2 is for measured costs: pass --profile or a TARGET too"),
        (("--profile", "none.json"), "profile 'none.json' cannot be read: No such file or directory"),
        (("--profile", "later.json"), "profile 'later.json': expected a profile of version 1, not of 2"),
        (("cases.py:make", "--microbatch-size", "17"), "the batch has only 16 rows"),
    ],
)
def test_what_does_not_go_together_or_is_no_profile(options: tuple[str, ...], message: str) -> None:
    Path("later.json").write_text(json.dumps({**PROFILE.to_dict(), "version": 2}))
    assert message in refusal("simulate", "--schedule", "1f1b", "-n", "2", *options)
