"""Graphs are cut where the slowest stage is fastest: published optima, and every small graph against brute force."""

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.plan import Transfer, Work, WorkGraph, cut_graph, graph_cut

PUBLISHED = json.loads((Path(__file__).parent / "partition.json").read_text())


def _published_graph(instance: dict[str, Any]) -> WorkGraph:
    nodes, edges = (PUBLISHED["graphs"][instance["graph"]][key] for key in ("nodes", "edges"))
    index = {node["id"]: number for number, node in enumerate(nodes)}
    works = tuple(
        Work(
            node["fwd"] + node["bwd"],
            node.get("memory_per_microbatch", 0),
            node["memory_fixed"] if "memory_fixed" in node else node["memory"],
        )
        for node in nodes
    )
    seconds = {"s": 1, "ms": 1e3}[instance["time_unit"]]
    moved: dict[Any, tuple[set[int], float]] = {}
    for number, edge in enumerate(edges):
        ends = {index[edge["from"]], index[edge["to"]]}
        each_for_itself = instance["objective"] == "load_sum_inflight"
        key = number if each_for_itself else (edge["from"], edge.get("pass"))
        there_and_back = "bytes" in edge
        cost = 2 * edge["bytes"] / instance["bandwidth_bytes_per_s"] * seconds if there_and_back else edge["cost"]
        moved.setdefault(key, (set(), cost))[0].update(ends)
    order = tuple((index[e["from"]], index[e["to"]]) for e in edges if e.get("pass") != "bwd")
    return WorkGraph(works, order, tuple(Transfer(frozenset(ends), cost) for ends, cost in moved.values()))


@pytest.mark.parametrize("instance", PUBLISHED["instances"], ids=lambda instance: instance["id"])
def test_published_optima_are_found(instance: dict[str, Any]) -> None:
    graph = _published_graph(instance)
    limit = instance["memory_limit_bytes"] or math.inf
    in_flight, beside = (instance["objective"] == name for name in ("load_sum_inflight", "stage_or_link"))
    found = cut_graph(graph, instance["devices"], memory_limit=limit, in_flight=in_flight, beside=beside)
    assert found is not None
    assert found.is_exact
    assert found.seconds == pytest.approx(instance["optimum"], rel=1e-6)
    assert _slowest(graph, found.stages, limit, in_flight=in_flight, beside=beside) == pytest.approx(found.seconds)


def _slowest(
    graph: WorkGraph, stages: tuple[tuple[int, ...], ...], limit: float, *, in_flight: bool, beside: bool
) -> float:
    """What the objective says of a cut, straight from its definition; infinite if it is not allowed."""
    stage_of = {work: number for number, stage in enumerate(stages) for work in stage}
    assert sorted(stage_of) == list(range(len(graph.works)))
    if any(stage_of[a] > stage_of[b] for a, b in graph.order):
        return math.inf
    slowest = 0.0
    for number, stage in enumerate(stages):
        works = [graph.works[work] for work in stage]
        microbatches = len(stages) - number if in_flight else 1
        if sum(microbatches * work.microbatch_bytes + work.fixed_bytes for work in works) > limit:
            return math.inf
        load = sum(work.seconds for work in works)
        over = 0.0
        for transfer in graph.transfers:
            on = {stage_of[end] for end in transfer.ends}
            if not beside and number in on and len(on) > 1:
                load += transfer.seconds
            if beside and min(on) <= number < max(on):
                over += transfer.seconds
        slowest = max(slowest, load, over)
    return slowest


@st.composite
def _graphs(draw: st.DrawFn) -> WorkGraph:
    count = draw(st.integers(1, 6))
    numbers = st.integers(0, 9)
    works = tuple(Work(draw(numbers), draw(numbers), draw(numbers)) for _ in range(count))
    names = draw(st.permutations(range(count)))
    pairs = [(names[a], names[b]) for a in range(count) for b in range(a + 1, count)]
    order = tuple(pair for pair in pairs if draw(st.booleans()))
    ends = st.frozensets(st.sampled_from(range(count)), min_size=1, max_size=3)
    transfers = tuple(Transfer(draw(ends), draw(numbers)) for _ in range(draw(st.integers(0, 4))))
    return WorkGraph(works, order, transfers)


@given(_graphs(), st.integers(1, 4), st.integers(0, 80), st.booleans(), st.booleans())
def test_no_cut_is_better(graph: WorkGraph, devices: int, limit: int, in_flight: bool, beside: bool) -> None:
    best = math.inf
    for stage_of in product(range(devices), repeat=len(graph.works)):
        used = sorted(set(stage_of))
        stages = tuple(tuple(w for w, s in enumerate(stage_of) if s == stage) for stage in used)
        best = min(best, _slowest(graph, stages, limit, in_flight=in_flight, beside=beside))
    found = cut_graph(graph, devices, memory_limit=limit, in_flight=in_flight, beside=beside)
    if found is None:
        assert best == math.inf
    else:
        assert found.seconds == pytest.approx(best)
        assert len(found.stages) <= devices
        assert _slowest(graph, found.stages, limit, in_flight=in_flight, beside=beside) == pytest.approx(best)


def test_stages_beside_the_slowest_are_balanced_too() -> None:
    graph = WorkGraph.line([Work(seconds) for seconds in (9, 1, 1, 1, 1, 1, 1)])
    found = cut_graph(graph, 3)
    assert found is not None
    assert found.stages == ((0,), (1, 2, 3), (4, 5, 6))


def test_two_towers_are_cut_across_the_order_in_which_they_are_listed() -> None:
    works = tuple(Work(seconds) for seconds in (3, 3, 1, 1))
    best, listed = cut_graph(WorkGraph(works, ((0, 1), (2, 3))), 2), cut_graph(WorkGraph.line(works), 2)
    assert best is not None
    assert listed is not None
    assert (best.stages, best.seconds) == (((0, 2), (1, 3)), 4)
    assert (listed.stages, listed.seconds) == (((0,), (1, 2, 3)), 5)


def test_too_many_orders_leave_one_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = WorkGraph(tuple(Work(1) for _ in range(12)), ())  # 4,096 downsets
    found = cut_graph(graph, 4)
    assert found is not None
    assert found.is_exact
    monkeypatch.setattr(graph_cut, "MOST_DOWNSETS", 4095)
    found = cut_graph(graph, 4)
    assert found is not None
    assert not found.is_exact
    assert found.seconds == 3


def test_a_thousand_works_into_64_stages() -> None:
    seconds = [1 + (7 * number) % 11 for number in range(1000)]
    found = cut_graph(WorkGraph.line([Work(one) for one in seconds]), 64)
    assert found is not None
    assert len(found.stages) == 64
    assert found.seconds <= sum(seconds) / 64 + max(seconds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: cut_graph(WorkGraph((), ()), 2), "0 works for 2 devices"),
        (lambda: cut_graph(WorkGraph((Work(1),), ()), 0), "1 works for 0 devices"),
        (lambda: cut_graph(WorkGraph((Work(1), Work(1)), ((0, 1), (1, 0))), 2), "work 0 must come before itself"),
        (lambda: WorkGraph((Work(1),), ((0, 1),)), "there is no work 1"),
        (lambda: Work(-1), r"Work\.seconds=-1"),
        (lambda: Work(1, math.nan), r"Work\.microbatch_bytes=nan"),
        (lambda: WorkGraph.line([Work(1), Work(1)], [1, 2]), "2 transfers for 2 works"),
    ],
)
def test_bad_input_gets_one_clear_error(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()
