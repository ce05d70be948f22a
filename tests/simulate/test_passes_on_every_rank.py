"""Passes of every microbatch on every rank: where they are placed, when they run, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import ArgumentError
from penstock.schedule import Op, Row, Schedule, check, generate
from penstock.schedule.generators import one_f_one_b
from penstock.simulate import LinkCost, StageCost, memory, simulate
from penstock.simulate.passes import Pass, Side, placed
from penstock.simulate.passes_run import WithPasses, simulate_with
from penstock.simulate.vocabulary import IN_FLIGHT, Vocabulary
from scaffolding.some_schedules import needs_by_hand, small_ones

seconds = st.floats(0, 4)


def by_hand(
    schedule: Schedule, costs: Sequence[StageCost], passes: Sequence[Pass], link: LinkCost, found: WithPasses
) -> dict[object, tuple[float, float]]:
    """Earliest times in the order of `found`, by going over all nodes until nothing changes any more.

    Nodes are actions, (pass, number, rank), and for collectives (pass, number).
    """
    placement, needs = schedule.placement, needs_by_hand(schedule)
    index = {one.name: which for which, one in enumerate(passes)}
    order: list[list[object]] = []
    for rank, track in enumerate(found.timeline.tracks):
        here = [*found.timeline.spans(rank), *found.spans[rank]]
        keys = [(s.start_seconds, s.end_seconds, place) for place, s in enumerate(here)]
        assert len(track) + len(found.spans[rank]) == len(here)
        rows = [here[place] for *_, place in sorted(keys)]
        order.append([s.action if hasattr(s, "action") else (index[s.name], s.number, rank) for s in rows])
    took: dict[Op, str] = {Op.F: "forward", Op.B: "backward", Op.I: "backward_input", Op.W: "backward_weight"}
    times: dict[object, tuple[float, float]] = {}
    sides = {side: [w for w, one in enumerate(passes) if one.side is side] for side in Side}
    actions = {action for row in order for action in row if not isinstance(action, tuple)}
    into = {}
    out = {}
    for action in actions:
        backward = action.op in (Op.B, Op.I)
        if action.op is Op.F and placement.is_first(action.stage):
            into[Side.INPUT, action.microbatch] = action
        if action.op is Op.F and placement.is_last(action.stage):
            out[Side.OUTPUT, action.microbatch] = action
        if backward and placement.is_last(action.stage):
            into[Side.OUTPUT, action.microbatch] = action
        if backward and placement.is_first(action.stage):
            out[Side.GRADIENT, action.microbatch] = action
    gated = {action: (side, number) for (side, number), action in into.items()}

    def end(node: object) -> float:
        return times.get(node, (0.0, 0.0))[1]

    def collective(which: int, number: int) -> float:
        """After all ranks, and after the one before it."""
        first = next(n for row in order for n in row if isinstance(n, tuple) and n[0] == which)
        numbers = [n[1] for n in order[0] if isinstance(n, tuple) and n[0] == which]
        now = 0.0
        assert first[1] == numbers[0]
        for one in numbers:
            now = max([now, *(end((which, one, rank)) for rank in range(schedule.ranks))])
            now += passes[which].collective_seconds
            if one == number:
                return now
        raise AssertionError(number)

    for _ in range(10_000):
        before = dict(times)
        for rank, row in enumerate(order):
            now = 0.0
            for node in row:
                if isinstance(node, tuple):
                    which, number, _ = node
                    chain = sides[passes[which].side]
                    place = chain.index(which)
                    if place:
                        now = max(now, collective(chain[place - 1], number))
                    elif (source := out.get((passes[which].side, number))) is not None:
                        # what leaves the last (first) stage reaches all ranks in the order in which it was made
                        numbers = [n[1] for n in order[rank] if isinstance(n, tuple) and n[0] == which]
                        earlier = numbers[: numbers.index(number) + 1]
                        now = max([now, *(end(out[passes[which].side, one]) for one in earlier)])
                        assert source
                    spent = passes[which].on(schedule.ranks)[rank]
                else:
                    for need in needs[node]:
                        other = placement.rank_of[need.stage]
                        now = max(now, end(need) + (link.latency_seconds if other != rank else 0.0))
                    if node in gated and (chain := sides[gated[node][0]]):
                        now = max(now, collective(chain[-1], gated[node][1]))
                    spent = getattr(costs[node.stage], f"{took[node.op]}_seconds")
                times[node] = (now, now + spent)
                now += spent
        if times == before:
            return times
    raise AssertionError("no end")


@settings(max_examples=60, deadline=None)
@given(small_ones(), st.data())
def test_against_earliest_times_by_hand(schedule: Schedule, data: st.DataObject) -> None:
    assume(schedule.slices == 1 and not any(any(row.joined) for row in schedule.rows))
    some = st.floats(0.1, 4)
    costs = [StageCost(data.draw(some), data.draw(some), data.draw(some)) for _ in range(schedule.stages)]
    sides = data.draw(st.lists(st.sampled_from(Side), max_size=4))
    passes = [
        Pass(str(which), side, tuple(data.draw(some) for _ in range(schedule.ranks)), data.draw(seconds))
        for which, side in enumerate(sides)
    ]
    link = LinkCost(data.draw(seconds))
    found = simulate_with(schedule, costs, passes, link)
    expected = by_hand(schedule, costs, passes, link, found)
    for span in found.timeline:
        assert (span.start_seconds, span.end_seconds) == pytest.approx(expected[span.action])
    for rank, spans in enumerate(found.spans):
        for span in spans:
            times = expected[int(span.name), span.number, rank]
            assert (span.start_seconds, span.end_seconds) == pytest.approx(times)
        assert found.pass_seconds(rank) == pytest.approx(
            sum(one.on(schedule.ranks)[rank] * len({s.number for s in spans if s.name == one.name}) for one in passes)
        )
        busy = found.timeline.busy_seconds(rank) + found.pass_seconds(rank)
        assert found.idle_seconds(rank) == pytest.approx(found.makespan_seconds - busy)


def test_backwards_in_another_order_than_forwards() -> None:
    """Three passes: the third of microbatch 3 comes before that of 2, as their backwards do."""
    schedule = Schedule("own", generate("gpipe", 1, 4).placement, 4, [Row.parse("0F0 0B0 0F1 0B1 0F2 0F3 0B3 0B2")])
    found = simulate_with(schedule, StageCost(1, 1, 1), [Pass(str(which), Side.OUTPUT, 1.0) for which in range(3)])
    assert [f"{s.name}{s.number}" for s in found.spans[0]] == [
        "00", "10", "20", "01", "11", "21", "02", "12", "03", "13", "23", "22",
    ]  # fmt: skip
    assert found.makespan_seconds == 24


@settings(max_examples=60, deadline=None)
@given(small_ones(), st.data())
def test_without_passes_it_is_the_plain_simulation(schedule: Schedule, data: st.DataObject) -> None:
    costs = [StageCost(*(data.draw(seconds) for _ in range(4))) for _ in range(schedule.stages)]
    link, contended = LinkCost(data.draw(seconds), data.draw(st.floats(0.1, 5))), data.draw(st.booleans())
    found = simulate_with(schedule, costs, [], link, contended=contended)
    assert found.timeline == simulate(schedule, costs, link, contended=contended)
    assert not any(found.spans)


@settings(max_examples=40, deadline=None)
@given(small_ones(), st.lists(st.sampled_from(Side), min_size=1, max_size=4))
def test_every_rank_runs_each_pass_of_each_microbatch_once(schedule: Schedule, sides: list[Side]) -> None:
    passes = [Pass(str(which), side, 1.0) for which, side in enumerate(sides)]
    places = placed(schedule, passes)
    found = simulate_with(schedule, StageCost(1, 1, 1), passes)
    for rank, spans in enumerate(found.spans):
        assert [(int(s.name), s.number) for s in spans] == [
            (one.which, one.number) for one in sorted(places, key=lambda one: one.before[rank])
        ]
    assert len({(one.which, one.number) for one in places}) == len(places)
    assert {one.number for one in places if passes[one.which].side is not Side.GRADIENT} <= set(range(schedule.numbers))


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_passes_that_take_nothing_cost_nothing_if_one_more_microbatch_is_in_flight(ranks: int) -> None:
    """Without it, each microbatch waits until the last rank has ended what it was at."""
    schedule, cost = one_f_one_b(ranks, 8, [ranks - rank + 1 for rank in range(ranks)]), StageCost(1, 1, 1)
    passes = [Pass("embedding", Side.INPUT, 0.0), Pass("vocabulary", Side.OUTPUT, 0.0), Pass("back", Side.GRADIENT, 0)]
    assert simulate_with(schedule, cost, passes).makespan_seconds == simulate(schedule, cost).makespan_seconds
    assert Vocabulary("vocab-2", 0.0).passes() == []


def test_an_output_pass_on_two_ranks_by_hand() -> None:
    """One microbatch: 0F0 1F0, then 5 and 1 seconds on the two ranks, a collective of 2, then 1B0 and 0B0."""
    found = simulate_with(generate("1f1b", 2, 1), StageCost(1, 1, 1), [Pass("v", Side.OUTPUT, (5.0, 1.0), 2.0)])
    assert [(s.start_seconds, s.end_seconds) for spans in found.spans for s in spans] == [(2, 7), (2, 3)]
    assert [(str(s.action), s.start_seconds) for s in found.timeline] == [
        ("0F0", 0), ("0B0", 11), ("1F0", 1), ("1B0", 9),
    ]  # fmt: skip
    assert found.makespan_seconds == 13
    assert [found.idle_seconds(rank) for rank in (0, 1)] == [5, 9]


@pytest.mark.parametrize("method", IN_FLIGHT)
def test_vocabularies_hide_their_collectives_behind_microbatches_in_flight(method: str) -> None:
    """A microbatch more for each collective hides it; without, each microbatch waits for it."""
    ranks, microbatches, output, collective = 4, 64, 0.5, 0.25
    spread = Vocabulary(method, output, 0.0, 0.0, collective)
    schedule = spread.schedule(ranks, microbatches)
    check(schedule)
    cost = StageCost(1, 1, 1, activation_bytes=1)
    found = simulate_with(schedule, cost, spread.passes())
    each = 3 + output + (2 * collective if method == "interlaced" else 0)
    assert found.makespan_seconds < microbatches * each * 1.005 + 3 * ranks * each
    peaks = [one.peak_activations for one in memory(schedule, cost, found.timeline)]
    assert peaks == [IN_FLIGHT[method](ranks - rank) for rank in range(ranks)]
    plain = simulate_with(generate("1f1b", ranks, microbatches), cost, spread.passes())
    assert plain.makespan_seconds > found.makespan_seconds + 0.5 * microbatches * collective


def test_what_is_refused() -> None:
    with pytest.raises(ArgumentError, match="pass 'v' takes -1"):
        Pass("v", Side.OUTPUT, -1.0)
    with pytest.raises(ArgumentError, match="pass 'v' has 3 times for 2 ranks"):
        simulate_with(generate("1f1b", 2, 2), StageCost(1, 1, 1), [Pass("v", Side.OUTPUT, (1.0, 1.0, 1.0))])
    with pytest.raises(ArgumentError, match="vocabulary method 'vocab-3': expected one of vocab-1, vocab-2"):
        Vocabulary("vocab-3", 1.0)
    for wrong in ([1, 2], [0, 0], [2]):
        with pytest.raises(ArgumentError, match="none above the rank before"):
            one_f_one_b(2, 4, wrong)
    assert one_f_one_b(3, 5, [3, 2, 1]) == generate("1f1b", 3, 5)
