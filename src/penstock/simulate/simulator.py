"""Schedule and costs -> Timeline: each action starts as soon as its rank and everything that it waits for allow."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from penstock.errors import ScheduleError
from penstock.schedule import Dependencies, Op, Schedule
from penstock.schedule.order import runnable_order
from penstock.schedule.timeline import Timeline, Track
from penstock.simulate.columns import Columns, Floats, Ints
from penstock.simulate.costs import NO_COST, LinkCost, Links, StageCost, cost_between, costs_by_stage

_NOT_RUN = -1.0
"""Instead of the time when a node's output left: it has not run. Anything lower: the same, and a rank sleeps on it."""


def simulate(
    schedule: Schedule,
    costs: StageCost | Sequence[StageCost],
    links: Links = NO_COST,
    *,
    contended: bool = False,
) -> Timeline:
    """The timeline of a schedule whose actions all start as soon as their rank and everything they wait for allow.

    A dependency that crosses ranks costs its link once. The schedule's own messages, if it has any, are left out: the
    link accounts for their cost. Reductions take no time and are left out too. Two actions that overlap start together
    and end together; in between, the timeline shows them one after the other.

    >>> from penstock.schedule import generate
    >>> from penstock.simulate import StageCost
    >>> timeline = simulate(generate("1f1b", ranks=2, microbatches=2), StageCost(1.0, 1.0, 1.0))
    >>> timeline.makespan_seconds, round(timeline.bubble_rate, 3)
    (9.0, 0.333)
    >>> for span in timeline.spans(1):
    ...     print(span.action, span.start_seconds, span.end_seconds)
    1F0 1.0 2.0
    1B0 2.0 4.0
    1F1 4.0 5.0
    1B1 5.0 7.0

    Args:
        schedule: with or without messages.
        costs: one for every stage, or one each. With several pipelines, for the stages of one, or of all.
        links: one cost between any two ranks, or costs by (sending rank, receiving rank).
        contended: a link carries one message at a time, in the order in which they were produced; otherwise any number.
            Only the time that bandwidth takes is exclusive: the latencies of messages overlap.

    Raises:
        ArgumentError: not one cost for each stage, or a link in use has no cost.
        ScheduleError: the schedule cannot be run.
    """
    by_stage = costs_by_stage(schedule.placement, costs)
    columns = Columns.of(schedule)
    wire, latency = _link_seconds(columns, by_stage, links)
    ran = _run(columns, _durations(columns, by_stage), wire, latency, contended=contended)
    if ran is None:
        runnable_order(Dependencies(schedule.with_rows(columns.rows)))  # reports which action waits for which
        raise ScheduleError(
            f"schedule {schedule.name!r} has a deadlock: the backward of an overlap waits for what its own "
            "forward must come before; write the two as separate actions"
        )
    starts, ends = ran
    tracks = []
    for rank, row in enumerate(columns.rows):
        part = slice(columns.first[rank], columns.first[rank + 1])
        start, end = starts[part], ends[part]
        waited = start - np.concatenate([[0.0], end[:-1]])[: len(start)]
        tracks.append(Track(row, *(array("d", column.tobytes()) for column in (start, end, waited))))
    return Timeline(tuple(tracks))


def _durations(columns: Columns, costs: Sequence[StageCost]) -> Floats:
    """The duration of each node. For two that overlap, each one's share of the time that both take."""
    table = np.zeros((len(Op), len(costs)))
    for stage, cost in enumerate(costs):
        table[Op.F.code, stage] = cost.forward_seconds
        table[Op.B.code, stage] = cost.backward_seconds
        table[Op.I.code, stage] = cost.backward_input_seconds
        table[Op.W.code, stage] = cost.backward_weight_seconds
    seconds = table[columns.op, columns.stage]
    fused = np.array([-1.0 if c.overlapped_seconds is None else c.overlapped_seconds for c in costs])
    pairs = np.flatnonzero(columns.joined)
    pairs = pairs[fused[columns.stage[pairs]] >= 0]
    both = seconds[pairs] + seconds[pairs + 1]
    share = np.divide(seconds[pairs], both, out=np.full(len(pairs), 0.5), where=both > 0)
    total = fused[columns.stage[pairs]]
    seconds[pairs] = total * share
    seconds[pairs + 1] = total - seconds[pairs]  # so that their end does not depend on how the share was rounded
    return np.asarray(seconds)


def _link_seconds(columns: Columns, costs: Sequence[StageCost], links: Links) -> tuple[Floats, Floats]:
    """For each node that another rank waits for: how long its message occupies the wire, and its latency."""
    wire, latency = np.zeros(len(columns.need)), np.zeros(len(columns.need))
    used = np.flatnonzero(columns.need >= 0)
    made = columns.need[used]
    # The same bytes cross a cut in both directions: the lower stage's output, or its gradient.
    sizes = np.array([cost.output_bytes for cost in costs], dtype=float)
    size = sizes[np.minimum(columns.stage[used], columns.stage[made])]
    pairs = columns.rank[made] * len(columns.rows) + columns.rank[used]
    for pair in np.unique(pairs).tolist():
        ends = divmod(pair, len(columns.rows))
        link = cost_between(links, *ends)
        on = pairs == pair if len(pairs) and not isinstance(links, LinkCost) else slice(None)
        latency[made[on]] = link.latency_seconds
        wire[made[on]] = size[on] / link.bytes_per_second
        if isinstance(links, LinkCost):
            break
    return wire, latency


def _run(
    columns: Columns, durations: Floats, wire: Floats, latency: Floats, *, contended: bool
) -> tuple[Floats, Floats] | None:
    """When each node starts and ends; None if the ranks wait for each other in a circle.

    Each rank is a coroutine that runs ahead until it reaches an action whose need has not run, and is resumed by the
    rank that runs it. Everything that it reads and writes for a node is in arrays: lists of millions of numbers would
    be scattered over memory, and the processor would wait for them most of the time.
    """
    first = columns.first.tolist()
    second, hold = _overlaps(columns, durations)
    crossing = columns.need >= 0
    lag = np.zeros(first[-1])  # from the time in `left` to the message's arrival
    lag[crossing] = (latency if contended else latency + wire + hold)[columns.need[crossing]]
    needs, lags, seconds = (_array(column) for column in (columns.need, lag, durations))
    left = array("d", [_NOT_RUN]) * first[-1]
    ends = array("d", left) if contended else left
    send = _contended(columns, wire, hold) if contended else None
    turns: list[Iterator[None]] = []
    unfinished = set(range(len(first) - 1))

    def run_rank(rank: int) -> Iterator[None]:
        here, node, now = slice(first[rank], first[rank + 1]), first[rank], 0.0
        sleeper = _NOT_RUN - 1 - rank
        for need, delay, duration in zip(needs[here], lags[here], seconds[here], strict=True):
            if need >= 0:
                while (sent := left[need]) < 0:
                    left[need] = sleeper
                    yield
                if (sent := sent + delay) > now:
                    now = sent
            if second and (need := second.get(node, -1)) >= 0:
                while (sent := left[need]) < 0:
                    left[need] = sleeper
                    yield
                now = max(now, sent + lags[node + 1])
            now += duration
            if (woken := left[node]) != _NOT_RUN:
                turns.append(ranks[int(_NOT_RUN - 1 - woken)])
            ends[node] = now
            if send is not None:
                left[node] = send(node, now)
            node += 1
        unfinished.discard(rank)

    ranks = [run_rank(rank) for rank in range(len(first) - 1)]
    turns += ranks
    while turns:
        next(turns.pop(), None)
    if unfinished:
        return None
    end = np.array(ends)
    return _starts(columns, end, np.array(left), lag), end


def _array(column: Ints | Floats) -> array[Any]:
    """The same numbers as a Python array, from which Python reads single ones faster than from numpy's."""
    return array(column.dtype.char, column.tobytes())


def _starts(columns: Columns, ends: Floats, left: Floats, lag: Floats) -> Floats:
    """When each node started: its rank was free, and everything that it and its overlap wait for was there."""
    ready = np.where(columns.need >= 0, left[columns.need] + lag, 0.0)
    pairs = np.flatnonzero(columns.joined)
    ready[pairs] = np.maximum(ready[pairs], ready[pairs + 1])
    before = np.concatenate([[0.0], ends[:-1]])
    before[columns.first[:-1][np.diff(columns.first) > 0]] = 0.0
    return np.asarray(np.maximum(before, ready))


def _contended(columns: Columns, wire: Floats, hold: Floats) -> Callable[[int, float], float]:
    """Returns a function that tells when the message of a node that has just ended leaves: once its link is free."""
    channel, wires, held = (_array(column) for column in (_channels(columns), wire, hold))
    free: defaultdict[int, float] = defaultdict(float)

    def send(node: int, now: float) -> float:
        now += held[node]
        if (link := channel[node]) >= 0:
            free[link] = now = max(now, free[link]) + wires[node]
        return now

    return send


def _overlaps(columns: Columns, durations: Floats) -> tuple[dict[int, int], Floats]:
    """For the first of two overlapping nodes: what the second waits for, and how much longer the second takes.

    Both start when both can, and the first one's output leaves when both end.
    """
    pairs = np.flatnonzero(columns.joined)
    hold = np.zeros(len(durations))
    hold[pairs] = durations[pairs + 1]
    return dict(zip(pairs.tolist(), columns.need[pairs + 1].tolist(), strict=True)), hold


def _channels(columns: Columns) -> Ints:
    """The number of the link that carries each node's message; -1 if no other rank waits for it."""
    used = np.flatnonzero(columns.need >= 0)
    made = columns.need[used]
    channel = np.full(len(columns.need), -1)
    channel[made] = columns.rank[made] * len(columns.rows) + columns.rank[used]
    return channel
