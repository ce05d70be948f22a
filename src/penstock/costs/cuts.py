"""Where to cut a row of units into stages so that the dearest stage is as cheap as possible. Exact.

What a stage costs may depend on what crosses its two cuts and on its position, so that no greedy rule would do. But the
best row of s stages that ends before unit j is the best row of s - 1 stages that ends before some unit i < j, and a
stage from i to j. Stages that cost more than some bound are left out, and if nothing is left the bound is doubled: so
the tables are narrow, and 1,000 units in 64 stages take a fraction of a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError

Floats = NDArray[np.float64]

Ints = NDArray[np.intp]

Table = Callable[[int], Floats]
"""For each stage, what it costs if it has k units and ends before unit j, at [k, j]."""

ROUNDING = 1 + 1e-12
"""Sums in another order may exceed a bound by this factor."""


@dataclass(frozen=True, slots=True)
class CutProblem:
    """What to divide, and what a stage costs. All sequences have an entry for each unit, if not each stage.

    Attributes:
        seconds: what a unit takes.
        crossing_seconds: what it takes to send what crosses a cut before this unit, there and back; both stages pay.
        held_bytes: what a unit takes all the time.
        activation_bytes: what it keeps for each microbatch in flight.
        working_bytes: what it takes besides while it runs; of a stage, one unit runs at a time.
        ties: two units that hold so many bytes in common, which a stage with both holds once.
        again_seconds: what a unit takes more on a stage that runs forwards again, as one does that has no room to keep
            activations of all microbatches; empty: none does.
        received_bytes: what such a stage keeps instead for each, if it begins with this unit.
        waiting_bytes: what a unit takes on it for each microbatch whose weight gradient waits.
        in_flight: for each stage, how many microbatches are in flight at most; empty: one.
        waiting: for each stage, how many of them wait for their weight gradient at most.
        limit_bytes: what a stage may take.
        speeds: for each stage, how fast its device computes; empty: all as fast as the one that `seconds` are of.
        balanced: what is to be even: seconds, or bytes.
    """

    seconds: Sequence[float]
    crossing_seconds: Sequence[float] = ()
    held_bytes: Sequence[float] = ()
    activation_bytes: Sequence[float] = ()
    in_flight: Sequence[int] = ()
    limit_bytes: float = math.inf
    balanced: Literal["seconds", "bytes"] = "seconds"
    speeds: Sequence[float] = ()
    working_bytes: Sequence[float] = ()
    ties: Sequence[tuple[int, int, float]] = ()
    again_seconds: Sequence[float] = ()
    received_bytes: Sequence[float] = ()
    waiting_bytes: Sequence[float] = ()
    waiting: Sequence[int] = ()

    def bytes_before(self, stage: int) -> Floats:
        """Return the memory on this stage of all units before each one, and before the end."""
        return self._bytes_before(self.in_flight[stage] if self.in_flight else 1)

    def bytes_again(self, stage: int, begins: Ints) -> Floats:
        """Return the memory on this stage of units from `begins` up to each one if it recomputes forwards."""
        before = self._bytes_before(1) + self.waiting[stage] * _prefix_sums(np.asarray(self.waiting_bytes))
        received: Floats = self.in_flight[stage] * _column(self.received_bytes, len(self.seconds))[begins]
        return before[None, :] - before[begins] + received

    def costs_before(self, stage: int | None = None) -> Floats:
        """Return the same for the balanced cost, without what crosses; without a stage: on the cheapest one."""
        if self.balanced == "seconds":
            speed = max(self.speeds, default=1.0) if stage is None or not self.speeds else self.speeds[stage]
            return _prefix_sums(_column(self.seconds, len(self.seconds))[:-1]) / speed
        return self._bytes_before(min(self.in_flight, default=1)) if stage is None else self.bytes_before(stage)

    def together(self, begins: Ints, ends: Ints) -> Floats:
        """Return the memory that units from `begins` to before `ends` take as one stage beyond the sum of theirs: ties
        are held once, and one unit runs at a time. Both may have any shape."""
        excess = np.zeros(np.broadcast(begins, ends).shape)
        for first, second, size in self.ties:
            excess -= size * ((begins <= first) & (second < ends))
        return excess + self._working(begins, ends) if any(self.working_bytes) else excess

    def _working(self, begins: Ints, ends: Ints) -> Floats:
        """While one unit runs, later ones keep nothing of this microbatch."""
        units = len(self.seconds)
        kept_before = _prefix_sums(_column(self.activation_bytes, units)[:-1])
        peaks = kept_before[1:] + _column(self.working_bytes, units)[:-1]
        longest = int(np.max(ends - begins, initial=1))
        range_peaks = np.full((longest + 1, units + 1), -np.inf)
        for length in range(1, longest + 1):
            range_peaks[length, length:] = np.maximum(range_peaks[length - 1, length:], peaks[: units - length + 1])
        excess: Floats = np.maximum(range_peaks[np.maximum(ends - begins, 0), ends] - kept_before[ends], 0.0)
        return excess

    def crossing(self) -> Floats:
        """Return what a cut before each unit costs each of its two stages."""
        if self.balanced == "bytes":
            return np.zeros(len(self.seconds) + 1)
        costs = _column(self.crossing_seconds, len(self.seconds))
        costs[0] = costs[-1] = 0.0
        return costs

    def _bytes_before(self, microbatches: int) -> Floats:
        units = len(self.seconds)
        static, activations = _column(self.held_bytes, units), _column(self.activation_bytes, units)
        return _prefix_sums((static + microbatches * activations)[:-1])


def best_cuts(problem: CutProblem, stages: int) -> list[int]:
    """Return the unit with which each stage begins. Minimize the most expensive stage, then the sum of squares.

    Raises:
        ArgumentError: there are fewer units than stages, or nothing fits; says what the least limit is.
    """
    units = len(problem.seconds)
    if not 1 <= stages <= units:
        raise ArgumentError(f"stages={stages}: expected from 1 to {units}, the number of units")
    before = problem.costs_before()
    bound = 2 * before[-1] / stages
    ties_save = problem.balanced == "bytes" and bool(problem.ties)  # a stage may then cost less than its units do
    while True:
        longest = int(np.max(np.arange(units + 1) - np.searchsorted(before, before - bound * ROUNDING)))
        longest = units if ties_save else longest
        table = _table(problem, longest)
        bottleneck = _min_bottleneck(table, stages, units)
        if bottleneck <= bound or (longest == units and math.isfinite(bottleneck)):
            return _most_even_cuts(table, bottleneck * ROUNDING, stages, units)
        if longest == units:
            raise ArgumentError(_describe_shortfall(problem, stages))
        bound = max(2 * bound, float(np.diff(before).max()))


def stage_loads(problem: CutProblem, starts: Sequence[int]) -> list[float]:
    """Return the balanced cost of each of these stages."""
    crossing, loads = problem.crossing(), []
    if problem.balanced == "bytes":
        return stage_bytes(problem, starts)
    for stage, (start, end) in enumerate(pairwise((*starts, len(problem.seconds)))):
        before = problem.costs_before(stage)
        loads.append(float(before[end] - before[start] + crossing[start] + crossing[end]))
    return loads


def stage_bytes(problem: CutProblem, starts: Sequence[int]) -> list[float]:
    """Return the memory of each of these stages, in bytes."""
    sizes = []
    for stage, (start, end) in enumerate(pairwise((*starts, len(problem.seconds)))):
        before = problem.bytes_before(stage)
        sizes.append(float(before[end] - before[start] + problem.together(np.array(start), np.array(end))))
    return sizes


def _describe_shortfall(problem: CutProblem, stages: int) -> str:
    unlimited = replace(problem, crossing_seconds=(), limit_bytes=math.inf, balanced="bytes", speeds=())
    loads = stage_loads(unlimited, best_cuts(unlimited, stages))
    return (
        f"memory_limit={problem.limit_bytes:,.0f} bytes: no cut into {stages} stages fits. The best one needs "
        f"{max(loads):,.0f} bytes, on stage {int(np.argmax(loads))}. Pass more memory, more stages, smaller "
        "microbatches, or recompute="
    )


def _table(problem: CutProblem, longest: int) -> Table:
    """Return the costs of stages of up to `longest` units; infinite for those that do not exist or take too much
    memory."""
    units = len(problem.seconds)
    lengths = np.arange(longest + 1)[:, None]
    ends = np.broadcast_to(np.arange(units + 1), (longest + 1, units + 1))
    begins = ends - lengths
    exists = (begins >= 0) & (lengths > 0)
    begins = np.maximum(begins, 0)
    extra_bytes = problem.together(begins, ends)
    cut_costs = problem.crossing()
    crossing_costs = np.where(exists, cut_costs[begins] + cut_costs[None, :], np.inf)

    def costs(stage: int) -> Floats:
        before = problem.costs_before(stage)
        by_range: Floats = before[None, :] - before[begins] + crossing_costs
        if problem.balanced == "bytes":
            by_range += extra_bytes
        if math.isfinite(problem.limit_bytes):
            bytes_before = problem.bytes_before(stage)
            too_large = bytes_before[None, :] - bytes_before[begins] + extra_bytes > problem.limit_bytes * ROUNDING
            if any(problem.again_seconds):
                speed = problem.speeds[stage] if problem.speeds else 1.0
                recompute_before = _prefix_sums(np.asarray(problem.again_seconds)) / speed
                by_range += np.where(too_large, recompute_before[None, :] - recompute_before[begins], 0.0)
                too_large &= problem.bytes_again(stage, begins) + extra_bytes > problem.limit_bytes * ROUNDING
            by_range[too_large] = np.inf
        return by_range

    if problem.balanced == "seconds" and math.isinf(problem.limit_bytes) and not problem.speeds:
        every_stage = costs(0)
        return lambda stage: every_stage
    return costs


def _min_bottleneck(table: Table, stages: int, units: int) -> float:
    """Return the least cost of the most expensive stage; infinite if no cuts are allowed."""
    best = _at_start(units)
    for stage in range(stages):
        costs = table(stage)
        best = np.maximum(_by_length(best, len(costs)), costs).min(axis=0)
    return float(best[-1])


def _most_even_cuts(table: Table, bound: float, stages: int, units: int) -> list[int]:
    """Return the cuts within the bound with the least sum of squares; among equal ones, those with later cuts."""
    best = _at_start(units)
    lengths: list[NDArray[Any]] = []
    for stage in range(stages):
        costs = table(stage)
        sums = _by_length(best, len(costs)) + np.where(costs <= bound, costs, np.inf) ** 2
        lengths.append(np.argmin(sums, axis=0))
        best = sums[lengths[-1], np.arange(units + 1)]
    starts: list[int] = []
    end = units
    for by_end in reversed(lengths):
        end -= int(by_end[end])
        starts.append(end)
    return starts[::-1]


def _at_start(units: int) -> Floats:
    """Return the cost of no stages, by where they end."""
    best = np.full(units + 1, np.inf)
    best[0] = 0.0
    return best


def _by_length(best: Floats, lengths: int) -> Floats:
    """best[j - k] at [k, j], infinite for j < k: a view."""
    padded = np.concatenate([np.full(lengths, np.inf), best])
    step = padded.strides[0]
    return np.lib.stride_tricks.as_strided(padded[lengths:], (lengths, len(best)), (-step, step), writeable=False)


def _column(values: Sequence[float], units: int) -> Floats:
    """Return one value for each unit, and one for the end; zeros if there are none."""
    column = np.zeros(units + 1)
    column[: len(values)] = values
    return column


def _prefix_sums(values: Floats) -> Floats:
    """Return the sums of the values before each one, and before the end."""
    return np.concatenate([[0.0], np.cumsum(values)])
