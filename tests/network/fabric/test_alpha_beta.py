"""Closed forms are what the lists of steps do; fits find the link that made the times."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import get_args

import pytest
from drawn_runs import record_of
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.network.fabric.algorithms import algorithms, busbw_factor, closed_form, generate
from penstock.network.fabric.alpha_beta import (
    LinkFit,
    fit,
    links_json,
    record_links,
)
from penstock.network.fabric.steps import Collective, Terms, cost

COLLECTIVES = get_args(Collective)
EVERY = [(kind, name) for kind in COLLECTIVES for name in algorithms(kind)]


def fit_link(points: Iterable[tuple[float, float]]) -> LinkFit:
    """Of single one-way messages."""
    return fit([(size, seconds, Terms(1, 1.0)) for size, seconds in points])


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("gather", 0.75),
     ("scatter", 0.75), ("broadcast", 1.0), ("reduce", 1.0), ("sendrecv", 1.0), ("send", 1.0)],
)  # fmt: skip
def test_bus_bandwidth_is_by_the_convention_of_nccl_tests(kind: str, factor: float) -> None:
    """doc/PERFORMANCE.md of nccl-tests, and its source for gather; of four ranks."""
    assert busbw_factor(kind, 4) == factor
    assert busbw_factor("all_to_all", 4, (5, 1, 1, 1)) == 3 * 5 / 8, "into the first"
    assert busbw_factor("all_to_all", 4, (2, 2, 2, 0)) == 1, "out of the last"


@pytest.mark.parametrize(("kind", "name"), EVERY)
def test_the_closed_form_is_what_the_steps_do(kind: str, name: str) -> None:
    for ranks in (*range(2, 18), 31, 33):
        done = cost(generate(kind, name, ranks))
        form = closed_form(kind, name, ranks)
        assert form.rounds == done.rounds, ranks
        assert form.bytes_factor == pytest.approx(done.bytes_factor, rel=1e-12), ranks


# -- fits -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.floats(1, 1e8), st.floats(1e-6, 10)), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_a_fit_is_never_negative_and_no_neighbor_is_better(points: list[tuple[float, float]]) -> None:
    sizes = [size for size, _ in points]
    if max(sizes) < 1.01 * min(sizes):
        return
    found = fit_link(points)

    def error(alpha: float, beta: float) -> float:
        return sum((1 - (alpha + beta * size) / seconds) ** 2 for size, seconds in points)

    alpha, beta = found.alpha_seconds, found.beta_seconds_per_byte
    assert alpha >= 0
    assert beta >= 0
    least = error(alpha, beta)
    # Steps as large as what the point that is reached first would take for either.
    one, other = min(s for _, s in points), min(s / size for size, s in points)
    for a, b in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, -1), (-1, 1)):
        near = error(max(alpha + 1e-3 * a * one, 0), max(beta + 1e-3 * b * other, 0))
        assert near >= least - 1e-9 * (1 + least)


def test_times_that_fall_with_the_size_have_no_bandwidth_term() -> None:
    found = fit_link([(1000, 2e-3), (100_000, 1e-3)])
    assert found.beta_seconds_per_byte == 0
    assert found.bytes_per_second == math.inf
    assert fit_link([(1000, 1e-3), (2000, 8e-3)]).alpha_seconds == 0


@pytest.mark.parametrize(
    "points", [[], [(1000, 1e-3)], [(1000, 1e-3), (1000, 2e-3)], [(1000, 0), (2000, 1)], [(1000, math.nan), (2000, 1)]]
)
def test_points_that_tell_nothing(points: list[tuple[float, float]]) -> None:
    with pytest.raises(ArgumentError, match="pass"):
        fit_link(points)


# -- links.json -------------------------------------------------------------------------------------------------------


def test_the_links_of_a_record_are_given_as_they_were_measured() -> None:
    links = [
        {"from": 0, "to": 1, "latency_seconds": 1e-4, "bytes_per_second": 1e7, "points": []},
        {"from": 1, "to": 2, "latency_seconds": 3e-4, "bytes_per_second": None},
        {"from": 2, "to": 1, "latency_seconds": 2e-4, "bytes_per_second": 5e6},
    ]
    record = record_of(hosts=3, links=links)
    made = json.loads(json.dumps(links_json(record)))
    assert made["links"] == [
        {"from": 0, "to": 1, "latency": 1e-4, "bandwidth": pytest.approx(1e7)},
        {"from": 1, "to": 2, "latency": 3e-4},
        {"from": 2, "to": 1, "latency": 2e-4, "bandwidth": pytest.approx(5e6)},
    ]
    assert made["all"] == {"latency": 3e-4, "bandwidth": pytest.approx(5e6)}
    assert "seconds" in made["units"]
    assert record_links(record)[1] == ((1, 2), LinkFit(3e-4, 0.0))
    assert links_json(record_of(hosts=3)) is None
