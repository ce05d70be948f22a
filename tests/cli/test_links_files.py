"""`--links FILE`: a measured network under a pipeline, as `penstock fabric` writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from command_line import as_json, output, refusal

from penstock.network.fabric.alpha_beta import links_json
from penstock.schedule import generate
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost

STAGE = {"forward": 0.3, "backward_input": 0.4, "backward_weight": 0.2}
TIMES = ("--forward", "0.3", "--backward-input", "0.4", "--backward-weight", "0.2")
SIZED = (*TIMES, "--output-bytes", "1e6")
TWO = ("simulate", "--schedule", "1f1b", "--ranks", "2", "--microbatches", "2")
FOUR = ("simulate", "--schedule", "1f1b", "--ranks", "4", "--microbatches", "8")
BETWEEN = [
    {"from": 0, "to": 1, "latency": 0.001, "bandwidth": 1e7},
    {"from": 1, "to": 0, "latency": 0.002, "bandwidth": 2e7},
]
EVERY = {"latency": 0.05, "bandwidth": 1e6}

Write = Callable[..., str]


def test_the_links_of_a_run_time_the_schedule(write: Write) -> None:
    """Each direction has its own."""
    ends = [(a, (a + step) % 4) for a in range(4) for step in (1, -1)]
    links = {(a, b): LinkCost(0.001 * (4 * a + b), 1e7 / (a + 4 * b)) for a, b in ends}
    record = {
        "links": [
            {"from": a, "to": b, "latency_seconds": link.latency_seconds, "bytes_per_second": link.bytes_per_second}
            for (a, b), link in links.items()
        ]
    }
    made = as_json(*FOUR, *SIZED, "--links", write(links_json(record)))
    expected = simulate(generate("1f1b", 4, 8), StageCost(0.3, 0.4, 0.2, output_bytes=1e6), links)
    assert made["makespan"] == expected.makespan_seconds
    assert made["makespan"] > as_json(*FOUR, *TIMES)["makespan"]


def test_pairs_that_were_not_measured_take_that_of_all(write: Write) -> None:
    few, all_pairs = write({"links": BETWEEN, "all": EVERY}), write({"all": EVERY}, "all.json")
    slow = as_json(*FOUR, *SIZED, "--links", all_pairs)["makespan"]
    assert as_json(*FOUR, *SIZED, "--links", few)["makespan"] < slow
    assert slow == pytest.approx(as_json(*FOUR, *SIZED, "--link-latency", "0.05", "--bandwidth", "1e6")["makespan"])


def test_a_network_with_fewer_hosts_than_ranks_is_refused(write: Write) -> None:
    path = write({"links": BETWEEN})
    line = refusal(*FOUR, *SIZED, "--links", path)
    assert f'{path} has links between 2 hosts, but 1f1b has 4 ranks: measure that many, or add "all": ' in line


def test_a_network_with_more_hosts_than_ranks_is_taken(write: Write) -> None:
    more = [*BETWEEN, {"from": 2, "to": 3, "latency": 5}]
    small, large = write({"links": BETWEEN}), write({"links": more}, "more.json")
    assert output(*TWO, *SIZED, "--links", large) == output(*TWO, *SIZED, "--links", small)


def test_a_pair_that_is_used_and_was_not_measured_is_named(write: Write) -> None:
    links = [{"from": 0, "to": 3, "latency": 1}]
    assert "no cost from rank 0 to rank 1" in refusal(*FOUR, *TIMES, "--links", write({"links": links}))


def test_links_and_numbers_of_links_contradict_each_other(write: Write) -> None:
    path = write({"all": EVERY})
    says = f"--links {path} already sets what --bandwidth would; pass only one of the two"
    assert refusal(*TWO, *SIZED, "--bandwidth", "5", "--links", path) == says


def test_stages_of_a_file_and_measured_links_go_together(write: Write) -> None:
    path = write({"links": BETWEEN})
    sized = write([{**STAGE, "output_bytes": 1e6}] * 2, "stages.json")
    numbers = as_json(*TWO, *SIZED, "--links", path)["makespan"]
    assert as_json(*TWO, "--costs", sized, "--links", path)["makespan"] == pytest.approx(numbers)
    both = write({"stages": [STAGE] * 2, "links": {"latency": 1}}, "both.json")
    assert "pass only one of the two" in refusal(*TWO, "--costs", both, "--links", path)


def test_messages_without_a_size_are_refused(write: Write) -> None:
    path = write({"links": BETWEEN})
    says = "the time of a message depends on its size; pass --output-bytes"
    assert says in refusal(*TWO, *TIMES, "--links", path)
    assert says in refusal(*TWO, "--costs", write([STAGE] * 2, "stages.json"), "--links", path)
    latency = write({"all": {"latency": 1}}, "latency.json")
    assert (
        as_json(*TWO, *TIMES, "--links", latency)["makespan"]
        == as_json(*TWO, *TIMES, "--link-latency", "1")["makespan"]
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"links": 3}, "links=3: expected a valid array"),
        ({"links": []}, "has no links: add some"),
        ({"link": BETWEEN}, "link is unknown to this version"),
        ({"all": {"bandwidth": 0}}, "all: bandwidth=0.0: expected a bandwidth above 0"),
        ({"all": 3}, "all=3: expected an object"),
    ],
)
def test_files_that_make_no_sense(write: Write, content: Any, says: str) -> None:
    path = write(content)
    line = refusal(*TWO, *SIZED, "--links", path)
    assert line.startswith(f"--links {path}")
    assert says in line
    assert len(line) < 400 + len(path)
