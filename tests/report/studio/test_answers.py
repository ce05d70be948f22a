"""The studio's figures are those of the command line, for every schedule and every slider."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cli.command_line import as_json
from penstock._base.errors import ArgumentError
from penstock.report.studio import answers
from penstock.report.studio.query import SimulationQuery
from penstock.schedule import schedule_specs

NAMES = tuple(one.name for one in schedule_specs())
OPTIONS = {"forward": "--forward", "backward_input": "--backward-input", "backward_weight": "--backward-weight"}


def numbers(question: SimulationQuery) -> list[str]:
    given = ["--ranks", str(question.ranks), "--microbatches", str(question.microbatches)]
    for name, option in OPTIONS.items():
        given += [option, str(getattr(question, name))]
    return [*given, "--link-latency", str(question.comm)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ranks": 6, "microbatches": 7},
        {"forward": 1.3, "backward_input": 0.7, "backward_weight": 2.1, "comm": 0.35},
        {"ranks": 2, "backward_weight": 0.0},
    ],
    ids=lambda changes: " ".join(changes) or "usual",
)
def test_figures_are_those_of_simulate(changes: dict[str, Any]) -> None:
    question = SimulationQuery(schedules=NAMES, **changes)
    answer = answers.simulate(question)
    said = as_json("simulate", "--schedule", "all", *numbers(question))
    expected = {one["name"]: one for one in said["schedules"]}
    found = {one["name"]: one for one in answer["schedules"]}
    assert found.keys() == expected.keys()
    for name, one in found.items():
        given = {key: value for key, value in one.items() if key != "fits"}
        assert given == {key: expected[name][key] for key in given}
    assert {one["name"]: one["reason"] for one in answer["not_allowed"]} == {
        one["name"]: one["reason"] for one in said["not_allowed"]
    }


def test_a_heavy_last_stage_is_a_file_of_costs(tmp_path: Path) -> None:
    question = SimulationQuery(schedules=("1f1b", "interleaved-1f1b"), head=0.6, forward=2.0)
    for one in answers.simulate(question)["schedules"]:
        chunks = one["chunks"]
        stages = [{"forward": 2 / chunks, "backward_input": 1 / chunks, "backward_weight": 1 / chunks}] * 4 * chunks
        last = {name: value + 0.6 * {"forward": 2}.get(name, 1) for name, value in stages[-1].items()}
        file = tmp_path / f"{one['name']}.json"
        file.write_text(json.dumps([*stages[:-1], last]))
        options = ("--schedule", one["name"], "--ranks", "4", "--microbatches", "8", "--costs", str(file))
        said = as_json("simulate", *options)
        assert one["span"] == pytest.approx(said["span"], rel=1e-12)
        assert one["bubble_rate"] == pytest.approx(said["bubble_rate"], rel=1e-12)
        assert one["peak_activations"] == said["peak_activations"]


def test_chunks_apply_to_schedules_that_can_have_them() -> None:
    question = SimulationQuery(schedules=("1f1b", "interleaved-1f1b", "zb-v"), chunks=3)
    assert {one["name"]: one["chunks"] for one in answers.simulate(question)["schedules"]} == {
        "1f1b": 1,
        "interleaved-1f1b": 3,
        "zb-v": 2,
    }
    (one,) = answers.simulate(replace(question, schedules=("interleaved-1f1b",)))["schedules"]
    both = as_json("simulate", "--schedule", "interleaved-1f1b,gpipe", "--stages-per-rank", "3", *numbers(question))
    said = next(other for other in both["schedules"] if other["name"] == "interleaved-1f1b")
    assert one["span"] == said["span"]
    found = answers.simulate(SimulationQuery(schedules=("gpipe", "1f1b"), memory_limit=4))["schedules"]
    assert {one["name"]: one["fits"] for one in found} == {"gpipe": False, "1f1b": True}
    (naive, other) = answers.walk(SimulationQuery(schedules=("naive", "1f1b"), ranks=3, microbatches=4))["walks"]
    assert (naive["slots"], other["slots"], len(other["ranks"])) == (24, 12, 3)


def test_a_search_is_the_commands() -> None:
    question = SimulationQuery(ranks=3, microbatches=6, memory_limit=2.0, forward=1.5)
    found = answers.search_for(question, "loop", 0.2)
    options = ("--activation-limit", "2", "--time-limit", "0.2", *numbers(question))
    said = as_json("search", *options)
    (one,) = found["schedules"]
    assert (one["span"], one["peak_activations"]) == (said["span"], said["peak_activations"])
    assert (found["lower_bound"], found["gap"]) == (said["lower_bound"], said["gap"])
    assert one["fits"]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"ranks": "65"}, "ranks=65: the studio takes 1 to 64"),
        ({"ranks": "0"}, "ranks=0: the studio takes 1 to 64"),
        ({"microbatches": "99999999999"}, "microbatches='99999999999': expected an integer"),
        ({"ranks": "four"}, "ranks='four': expected an integer"),
        ({"forward": "nan"}, "forward='nan': expected a number"),
        ({"forward": "-1"}, "forward=-1: expected a number from 0"),
        ({"comm": "1e300"}, "comm=1e+300: expected a number from 0 to 1,000,000"),
        ({"forward": "0", "backward_input": "0", "backward_weight": "0"}, "are all 0"),
        ({"memory_limit": "0.5"}, "a single microbatch needs 1"),
        ({"schedules": "1f1b,zigzag"}, "'zigzag' is not a known schedule"),
        ({"schedules": ",".join(["naive"] * 33)}, "at most 32 names"),
        (
            {"ranks": "64", "microbatches": "512", "schedules": "gpipe,1f1b,zb-h1,zb-h2"},
            "actions, and the studio shows 300,000",
        ),
        ({"rank": "4"}, "unknown parameter 'rank'"),
    ],
)
def test_questions_are_bounded(given: dict[str, str], says: str) -> None:
    with pytest.raises(ArgumentError) as raised:
        SimulationQuery.of(given)
    assert says in str(raised.value)


def test_too_long_a_walk_or_search_is_refused() -> None:
    with pytest.raises(ArgumentError, match="too many to go through"):
        answers.walk(SimulationQuery(schedules=("naive",), ranks=16, microbatches=64))
    with pytest.raises(ArgumentError, match="the studio searches up to 6,000"):
        answers.search_for(SimulationQuery(ranks=32, microbatches=512, schedules=()), "loop", 1.0)
    with pytest.raises(ArgumentError, match="searches up to 10 s"):
        answers.search_for(SimulationQuery(), "loop", 11.0)
    with pytest.raises(ArgumentError, match="expected csv"):
        answers.export(answers.simulate_named(SimulationQuery(), "1f1b"), "exe")
