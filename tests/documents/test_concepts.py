"""Every number in the pages about concepts is what the schedules say, and code prints what stands below it."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from math import inf
from pathlib import Path

import pytest
from blocks import ROOT, blocks, follow

from penstock.schedule import Op, generate, peak_activations
from penstock.schedule.timeline import Timeline
from penstock.simulate import LinkCost, StageCost, simulate
from penstock.simulate.search import search

PAGES = ROOT / "docs" / "concepts"
P, M = 4, 8


@cache
def run(name: str, m: int = M, cost: tuple[float, ...] = (1, 1, 1), latency: float = 0) -> Timeline:
    """As the figures: `interleaved-1f1b:4` has four chunks; costs are of all that a rank does for a microbatch."""
    name, _, chunks = name.partition(":")
    schedule = generate(name, P, m, stages_per_rank=int(chunks) if chunks else None)
    share = schedule.placement.depth // P
    return simulate(schedule, StageCost(*(seconds / share for seconds in cost)), LinkCost(latency, inf))


def slots(name: str, m: int = M, latency: float = 0) -> str:
    return f"{run(name, m, latency=latency).makespan_seconds:g}"


def bubble(name: str, m: int = M, cost: tuple[float, ...] = (1, 1, 1)) -> str:
    return f"{run(name, m, cost).bubble_rate:.0%}"


def memory(name: str, m: int = M) -> str:
    """Of the fullest rank, in microbatches on all of a rank's stages."""
    schedule = generate(name.partition(":")[0], P, m, stages_per_rank=int(name.partition(":")[2] or 0) or None)
    return f"{max(peak_activations(schedule)) / (schedule.placement.depth // P):g}"


def first_wait(name: str) -> str:
    """Of rank 0 for its first gradient."""
    spans = run(name).spans(0)
    return f"{next(span for span in spans if span.action.op in (Op.B, Op.I)).waited_seconds:g}"


def heavy(name: str) -> Timeline:
    return simulate(generate(name, P, M), [StageCost(1, 1, 1)] * 3 + [StageCost(2, 2, 2)])


def row(name: str) -> str:
    return f"{bubble(name)} | {memory(name)} |"


REAL = (10.0, 12.0, 8.0)
CLAIMS: list[tuple[str, Callable[[], str]]] = [
    ("index", lambda: f"cut the model into stages | {row('naive')}"),
    ("index", lambda: f"cut the batch into microbatches | {row('gpipe')}"),
    ("index", lambda: f"run each backward as early as possible | {row('1f1b')}"),
    ("index", lambda: f"several small stages on each rank | {row('interleaved-1f1b:2')}"),
    ("index", lambda: f"fill gaps with weight gradients | {row('zb-h1')}"),
    ("index", lambda: f"more forwards in advance | {row('zb-h2')}"),
    ("index", lambda: f"into a V | {row('zb-v')}"),
    ("index", lambda: f"from both ends | {row('dualpipe')}"),
    ("naive", lambda: f"Here it is {bubble('naive', 1)}"),
    ("naive", lambda: f"It takes {slots('naive', 2)} slots, as long as one device would"),
    ("gpipe", lambda: f"Four ranks take {slots('gpipe')} slots where one would take {slots('naive')}"),
    *(("gpipe", lambda m=m: f"| {m} | {bubble('gpipe', m)} | {memory('gpipe', m)} |") for m in (4, 8, 16, 32)),
    ("1f1b", lambda: f"Both take {slots('gpipe')} slots"),
    ("1f1b", lambda: f"Both take {slots('1f1b')} slots"),
    ("1f1b", lambda: f"under GPipe each rank holds up to {memory('gpipe')} microbatches, under 1F1B"),
    ("1f1b", lambda: f"under 1F1B rank 0 holds {memory('1f1b')} and rank 3 only 1"),
    ("1f1b", lambda: f"m = {M}, 1F1B goes on to m = 32 and a bubble of {bubble('1f1b', 32)}"),
    ("interleaved", lambda: f"{bubble('1f1b')} for one chunk, {bubble('interleaved-1f1b:2')} for two and"),
    ("interleaved", lambda: f"and {bubble('interleaved-1f1b:4')} for four"),
    ("interleaved", lambda: f"take {slots('1f1b', latency=0.5)}, {slots('interleaved-1f1b:2', latency=0.5)} and"),
    ("interleaved", lambda: f"and {slots('interleaved-1f1b:4', latency=0.5)} slots"),
    ("interleaved", lambda: f"here {memory('interleaved-1f1b:2')} for two chunks instead of {memory('1f1b')}"),
    ("zero-bubble", lambda: f"{slots('1f1b', 1)} in all"),
    ("zero-bubble", lambda: f"run beside it: {slots('zb-h1', 1)}."),
    ("zero-bubble", lambda: f"ZB-H1 takes {slots('zb-h1')} slots instead of {slots('1f1b')}"),
    ("zero-bubble", lambda: f"for {first_wait('zb-h1')} slots instead of {first_wait('1f1b')}"),
    ("zero-bubble", lambda: f"a bubble of {bubble('zb-h1')} instead of {bubble('1f1b')}"),
    ("zero-bubble", lambda: f"takes {slots('zb-h2')} slots, as with ZB-H1; every rank takes {M * 3}"),
    ("zero-bubble", lambda: f"as a whole takes {slots('zb-h1')} slots"),
    ("zero-bubble", lambda: f"on every rank, here {memory('zb-h2')}"),
    ("zero-bubble", lambda: f"half as long: {slots('zb-v')} slots in all"),
    ("zero-bubble", lambda: "F = {:g}, I = {:g} and W = {:g}, the bubbles of".format(*REAL)),
    ("zero-bubble", lambda: f"W = 8, the bubbles of 1F1B, ZB-H1 and ZB-H2 are {bubble('1f1b', cost=REAL)}, "),
    ("zero-bubble", lambda: f", {bubble('zb-h1', cost=REAL)} and {bubble('zb-h2', cost=REAL)}"),
    ("bidirectional", lambda: f"a bubble of {bubble('chimera')} instead of {bubble('1f1b')}"),
    ("bidirectional", lambda: f"behind the computation of the other: {bubble('dualpipe')}"),
    ("bidirectional", lambda: f"here {memory('v-half')} and {memory('v-min')}, where 1F1B's rank 0 holds"),
    ("bidirectional", lambda: f"where 1F1B's rank 0 holds {memory('1f1b')}."),
    ("bidirectional", lambda: f"bubbles are {bubble('v-half')} and {bubble('v-min')}"),
    ("unequal", lambda: f"bubbles are {heavy('1f1b').bubble_rate:.0%} and {heavy('zb-h1').bubble_rate:.0%}"),
    ("unequal", lambda: f"here {heavy('1f1b').busy_seconds(3):g} slots"),
    ("unequal", lambda: f"{slots('1f1b', latency=0.5)} slots instead of {slots('1f1b')}"),
    ("unequal", lambda: f"GPipe takes {slots('gpipe', latency=0.5)}"),
    ("search", lambda: f"ZB-H1 holds {memory('zb-h1')} microbatches, ZB-H2 holds {memory('zb-h2')}"),
]


@pytest.mark.parametrize(("page", "said"), CLAIMS, ids=[f"{page}-{k}" for k, (page, _) in enumerate(CLAIMS)])
def test_numbers_are_those_of_the_schedules(page: str, said: Callable[[], str]) -> None:
    text = re.sub(r"\s+", " ", (PAGES / f"{page}.md").read_text(encoding="utf-8")).replace("*", "")
    assert said().replace("*", "") in text


@pytest.mark.parametrize("cost", [(1, 1, 1), (2, 3, 4), (10, 12, 8), (5, 2, 2)])
def test_formulas_of_the_waits_hold(cost: tuple[float, float, float]) -> None:
    f, i, w = cost
    for name in ("gpipe", "1f1b"):
        assert run(name, cost=cost).waited_seconds(0) == (P - 1) * (f + i + w)
    assert run("interleaved-1f1b:2", cost=cost).waited_seconds(0) == (P - 1) * (f + i + w) / 2
    assert run("zb-h1", cost=cost).waited_seconds(0) == (P - 1) * max(i, f + i - w)
    assert run("zb-h2", cost=cost).waited_seconds(0) == (P - 1) * max(0, i - f, f + i - 2 * w)


def test_rank_0_of_zb_h1_waits_for_its_first_gradient_only() -> None:
    """And 1F1B's waits three times more, a slot each, in its cool-down."""
    assert [span.waited_seconds for span in run("zb-h1").spans(0) if span.waited_seconds] == [3.0]
    assert [span.waited_seconds for span in run("1f1b").spans(0) if span.waited_seconds] == [6.0, 1.0, 1.0, 1.0]


def test_a_rank_of_zero_bubble_never_waits_between_its_first_action_and_its_last() -> None:
    for name in ("zb-h2", "zb-v"):
        timeline = run(name)
        for rank in range(P):
            track = timeline.tracks[rank]
            assert track.end[-1] - track.start[0] == timeline.busy_seconds(rank) == 3 * M
            assert sum(track.waited[1:]) == 0


def test_the_search_is_as_fast_as_zb_h2_in_less_memory() -> None:
    costs, link = [StageCost(10, 10, 9)] * P, LinkCost(2, inf)
    found = search(generate("1f1b", P, M).placement, M, costs, link, memory_limit=6, seconds=0.5)
    known = simulate(generate("zb-h2", P, M), costs, link).makespan_seconds
    assert found.objective_seconds == found.lower_bound_seconds == known
    assert max(peak_activations(found.schedule)) <= 6


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_code_prints_what_stands_below_it(page: Path) -> None:
    follow([block for block in blocks() if block.path == page], {})
