"""`--costs FILE` and `--links FILE`: what they hold counts, and what makes no sense in one is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import as_json, output, refusal

from network.fabric.drawn_runs import record_of
from penstock.network.fabric.alpha_beta import links_json
from penstock.schedule import generate
from penstock.simulate import LinkCost, StageCost, simulate

STAGE = {"forward": 3, "backward_input": 4, "backward_weight": 2}
BETWEEN = [{"from": 0, "to": 1, "latency": 1}, {"from": 1, "to": 0, "latency": 2}]
TWO = ("--ranks", "2", "--microbatches", "2")
SIMULATE = ("simulate", "--schedule", "1f1b", *TWO)

Write = Callable[..., str]


def stage_with(forward: str) -> str:
    return f'[{{"forward": {forward}, "backward_input": 4, "backward_weight": 2}}, {json.dumps(STAGE)}]'


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[" * 100_000, " is not JSON: its values are nested too deeply"),
        ('[{"forward": 1,}]', " is not JSON: trailing comma at line 1 column "),
        ("[]", ": expected a list with an object for each stage; see --help"),
        ("{}", ": stages is missing"),
        ('[{"forwards": 1}]', ", stage 0: forward is missing"),
        ([{**STAGE, "forwrd": 1}], ", stage 0: forwrd is unknown to this version; expected one of forward, "),
        ([{**STAGE, "forward": "1"}], ", stage 0: forward='1': expected a valid number"),
        ([3], ": stages[0]=3: expected an object"),
        ({"stages": [STAGE], "links": {"latency": 1, "bandwith": 2}}, ", links: bandwith is unknown to this version"),
        ({"stages": [STAGE, STAGE], "links": {"bandwidth": 2}}, ": the time of a message depends on its size; pass"),
        ({"stages": [STAGE, STAGE], "links": {"latency": -1}}, ", links: latency="),
        ([STAGE, STAGE, STAGE], " has 3 stages, but 1f1b needs 2: list that many"),
    ],
)
def test_what_cannot_be_read(write: Write, content: Any, says: str) -> None:
    path = write(content)
    line = refusal(*SIMULATE, "--costs", path)
    assert line.startswith(f"--costs {path}{says}"), line


@pytest.mark.parametrize(
    ("number", "says"),
    [
        ("1" + "0" * 100, "expected a number below 1e+100; pass it in a larger unit"),
        ("-1", "forward=-1.0: expected a cost of 0 or more"),
        ("1e400", "forward=inf: expected a finite number"),
        ("NaN", "numbers must be finite, without NaN or Infinity"),
        ("null", "forward=None: expected a valid number"),
    ],
)
def test_numbers_that_are_no_costs(write: Write, number: str, says: str) -> None:
    line = refusal(*SIMULATE, "--costs", write(stage_with(number)))
    assert says in line
    assert len(line) < 400


# -- links ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"from": 0, "to": 1, "latency": 5}, "link 2: link 0 is also from rank 0 to rank 1; keep one of them"),
        ({"from": True, "to": 0}, "link 2: from=True: expected a rank, an integer >= 0"),
        ({"from": -1, "to": 0}, "link 2: from=-1: expected a rank, an integer >= 0"),
        ({"from": 1, "to": 1}, "link 2: from and to are both rank 1; name two ranks, or remove it"),
        ({"to": 1}, "link 2: expected ranks, as in "),
        (3, "link 2: expected ranks, as in "),
        (
            {"from": 0, "to": 2},
            "has a link from rank 0 to rank 2, but the last rank of 1f1b is 1: correct or remove",
        ),
        ({"from": 10**400, "to": 0}, "has a link from rank 1000"),
    ],
)
def test_links_that_make_no_sense(write: Write, more: Any, says: str) -> None:
    line = refusal(*SIMULATE, "--costs", write({"stages": [STAGE] * 2, "links": [*BETWEEN, more]}))
    assert says in line
    assert len(line) < 400


def test_links_of_all_pairs_are_taken(write: Write) -> None:
    one_way = write({"stages": [STAGE] * 2, "links": BETWEEN[:1]})
    assert "links has no cost from rank 1 to rank 0, which this schedule uses" in refusal(*SIMULATE, "--costs", one_way)
    made = as_json(*SIMULATE, "--costs", write({"stages": [STAGE] * 2, "links": BETWEEN}))
    assert made["makespan"] > as_json(*SIMULATE, "--costs", write([STAGE] * 2))["makespan"]


def test_the_search_names_its_placement(write: Write) -> None:
    path = write({"stages": [STAGE] * 2, "links": [*BETWEEN, {"from": 5, "to": 9}]})
    assert "the last rank of this placement of 2 ranks is 1" in refusal("search", *TWO, "--costs", path)
    says = "has 2 stages, but this placement of 2 ranks needs 4: list that many"
    assert says in refusal("search", *TWO, "--placement", "v", "--costs", path)


def test_lists_are_costs_by_microbatch(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"

    def made(*stages: dict[str, object]) -> tuple[str, ...]:
        file.write_text(json.dumps(list(stages)))
        return ("--costs", str(file))

    plain = {"forward": 1, "backward_input": 2, "backward_weight": 0}
    long = {**plain, "forward": [1, 9, 1, 1]}
    numbers = ("--schedule", "gpipe", "--ranks", "2", "--microbatches", "4")
    costs = [StageCost(1, 2, 0), [StageCost(f, 2, 0) for f in (1, 9, 1, 1)]]
    expected = simulate(generate("gpipe", 2, 4), costs)
    assert as_json("simulate", *numbers, *made(plain, long))["makespan"] == expected.makespan_seconds
    swept = as_json("simulate", "--schedule", "gpipe", "--ranks", "1,2", "--microbatches", "4", *made(plain, long))
    assert [cell["makespan"] for cell in swept["sweep"]] == [4 * 6 + 8, expected.makespan_seconds]
    assert "stage 1 has 4 costs for 3 microbatches" in refusal("simulate", *numbers[:-1], "3", *made(plain, long))
    uneven = {**long, "backward_input": [1, 2]}
    assert "stage 1: lists of 2 and 4 numbers" in refusal("simulate", *numbers, *made(plain, uneven))
    wrong = {**plain, "forward": [1, -1]}
    assert "stage 0, microbatch 1: forward=-1.0: expected a cost of 0 or more" in refusal(
        "simulate", *numbers, *made(wrong, plain)
    )
    says = refusal("search", "--ranks", "2", "--microbatches", "4", *made(plain, long))
    assert "a stage has costs per microbatch, but the search takes one" in says


# -- a measured network under a pipeline, as `penstock fabric` writes it ----------------------------------------------

SHORT = {"forward": 0.3, "backward_input": 0.4, "backward_weight": 0.2}
TIMES = ("--forward", "0.3", "--backward-input", "0.4", "--backward-weight", "0.2")
SIZED = (*TIMES, "--output-bytes", "1e6")
PAIR = ("simulate", "--schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
FOUR = ("simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8")
MEASURED = [
    {"from": 0, "to": 1, "latency": 0.001, "bandwidth": 1e7},
    {"from": 1, "to": 0, "latency": 0.002, "bandwidth": 2e7},
]
EVERY = {"latency": 0.05, "bandwidth": 1e6}


def test_the_links_of_a_run_time_the_schedule(write: Write) -> None:
    """Each direction has its own."""
    ends = [(a, (a + step) % 4) for a in range(4) for step in (1, -1)]
    links = {(a, b): LinkCost(0.001 * (4 * a + b), 1e7 / (a + 4 * b)) for a, b in ends}
    measured = [
        {"from": a, "to": b, "latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}
        for (a, b), link in links.items()
    ]
    made = as_json(*FOUR, *SIZED, "--links", write(links_json(record_of(hosts=4, links=measured))))
    expected = simulate(generate("1f1b", 4, 8), StageCost(0.3, 0.4, 0.2, output_bytes=1e6), links)
    assert made["makespan"] == expected.makespan_seconds
    assert made["makespan"] > as_json(*FOUR, *TIMES)["makespan"]


def test_pairs_that_were_not_measured_take_that_of_all(write: Write) -> None:
    more = [*MEASURED, {"from": 2, "to": 0, "latency": 5}]
    few, all_pairs = write({"links": more, "all": EVERY}), write({"all": EVERY}, "all.json")
    assert output(*PAIR, *SIZED, "--links", few), "with more hosts than ranks"
    slow = as_json(*FOUR, *SIZED, "--links", all_pairs)["makespan"]
    assert as_json(*FOUR, *SIZED, "--links", few)["makespan"] < slow
    assert slow == pytest.approx(as_json(*FOUR, *SIZED, "--link-latency", "0.05", "--bandwidth", "1e6")["makespan"])


def test_stages_of_a_file_and_measured_links_go_together(write: Write) -> None:
    path = write({"links": MEASURED})
    sized = write([{**SHORT, "output_bytes": 1e6}] * 2, "stages.json")
    numbers = as_json(*PAIR, *SIZED, "--links", path)["makespan"]
    assert as_json(*PAIR, "--costs", sized, "--links", path)["makespan"] == pytest.approx(numbers)
    both = write({"stages": [SHORT] * 2, "links": {"latency": 1}}, "both.json")
    assert "pass only one of the two" in refusal(*PAIR, "--costs", both, "--links", path)
    says = f"--links {path} already sets what --bandwidth would; pass only one of the two"
    assert refusal(*PAIR, *SIZED, "--bandwidth", "5", "--links", path) == says


def test_messages_without_a_size_are_refused(write: Write) -> None:
    path = write({"links": MEASURED})
    says = "the time of a message depends on its size; pass --output-bytes"
    assert says in refusal(*PAIR, *TIMES, "--links", path)
    assert says in refusal(*PAIR, "--costs", write([SHORT] * 2, "stages.json"), "--links", path)
    latency = write({"all": {"latency": 1}}, "latency.json")
    assert (
        as_json(*PAIR, *TIMES, "--links", latency)["makespan"]
        == as_json(*PAIR, *TIMES, "--link-latency", "1")["makespan"]
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"links": 3}, "links=3: expected a valid array"),
        ({"links": []}, "has no links: add some"),
        ({"link": MEASURED}, "link is unknown to this version"),
        ({"all": {"bandwidth": 0}}, "all: bandwidth=0.0: expected a bandwidth above 0"),
        ({"links": [*MEASURED, {"from": 1, "to": 3, "latency": 1}]}, "no cost from rank 1 to rank 2"),
        ({"links": MEASURED}, 'has links between 2 hosts, but 1f1b has 4 ranks: measure that many, or add "all": '),
        ({"all": 3}, "all=3: expected an object"),
    ],
)
def test_files_that_make_no_sense(write: Write, content: Any, says: str) -> None:
    path = write(content)
    line = refusal(*FOUR, *SIZED, "--links", path)
    assert line.startswith(f"--links {path}") or "no cost from rank" in line
    assert says in line
    assert len(line) < 400 + len(path)
