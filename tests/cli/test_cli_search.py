"""`penstock search`: what it finds is legal, within the limit, timed as by the library; never worse than a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, penstock

from penstock.schedule import Placement, check, peak_activations, read_csv
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost

NUMBERS = ("--ranks", "4", "--microbatches", "8", "--time-limit", "0.2")
COSTS = ("--forward", "10", "--backward-input", "11", "--backward-weight", "7", "--link-latency", "0.5")


def find(*options: str) -> Any:
    return as_json("search", *NUMBERS, *COSTS, *options)


@pytest.mark.parametrize(("placement", "objective"), [("loop", "span"), ("v", "makespan")])
def test_schedule_that_it_writes_is_the_one_that_it_timed(tmp_path: Path, placement: str, objective: str) -> None:
    path = tmp_path / "out.csv"
    made = find("--placement", placement, "--objective", objective, "--activation-limit", "4", "--out", str(path))
    schedule = read_csv(path)
    chunks = 2 if placement == "v" else 1
    assert schedule.placement == (Placement.v(4) if placement == "v" else Placement.loop(4))
    assert not check(schedule)
    assert max(peak_activations(schedule)) <= 4 * chunks
    timeline = simulate(schedule, StageCost(10, 11, 7), LinkCost(0.5))
    assert made["span"] == pytest.approx(timeline.span_seconds)
    assert max(made["peak_activations"]) <= 4
    assert made["chunks"] == chunks
    assert made["gap"] == pytest.approx(made[objective] / made["lower_bound"] - 1, abs=1e-6)
    again = as_json("simulate", "--csv", str(path), *COSTS)
    same = ("makespan", "span", "bubble_rate", "peak_activations", "idle")
    assert {key: again[key] for key in same} == {key: made[key] for key in same}


def test_limit_counts_activations_of_a_microbatch_whatever_their_unit(tmp_path: Path) -> None:
    for options in (("--memory-activation", "50"), ("--memory-activation", "50", "--memory-weight-grad", "50")):
        made = find("--placement", "v", "--activation-limit", "3", *options)
        assert max(made["peak_activations"]) <= 3
        assert max(one["activations"] for one in made["memory"]) <= 3 * 2 * 50
    stages = [{"forward": 1, "backward_input": 1, "backward_weight": 1, "activation": 1 + rank} for rank in range(4)]
    (tmp_path / "costs.json").write_text(json.dumps(stages))
    made = as_json("search", *NUMBERS, "--activation-limit", "2", "--costs", str(tmp_path / "costs.json"))
    assert max(made["peak_activations"]) <= 2
    assert all(one["activations"] <= 2 * (1 + rank) for rank, one in enumerate(made["memory"]))


def test_it_says_where_it_looked_and_what_is_shorter_elsewhere() -> None:
    """In a loop, nothing in so little memory comes near v-min, for which each rank's work is cut in two."""
    options = ("search", "--ranks", "4", "--microbatches", "8", "--time-limit", "0.2", "--activation-limit", "2")
    made = as_json(*options)
    compared = as_json("simulate", "--schedule", "all", "--ranks", "4", "--microbatches", "8")["schedules"]
    fitting = [one for one in compared if max(one["peak_activations"]) <= 2]
    best = min(fitting, key=lambda one: one["span"])
    assert made["placement"] == "loop"
    assert made["shorter_elsewhere"] == {
        "name": best["name"],
        "seconds": best["span"],
        "where": "on a V",
        "option": "--placement v",
        "share": 0.5,
    }
    assert as_json(*options, "--placement", "v")["shorter_elsewhere"] is None
    text = " ".join(output(*options).split())
    assert "placement in a loop; bound and baseline hold for this placement only" in text
    assert f"alternative {best['name']} on a V is " in text
    assert "use --placement v, and multiply the costs by 0.5" in text


def test_long_work_is_announced() -> None:
    (line,) = penstock("search", "--ranks", "1", "--microbatches", "2", "--time-limit", "60").stderr.splitlines()
    assert line.startswith("penstock: searching for about 60 s")
