"""The fastest way to cut a graph of work into consecutive stages, exactly, along any order that its dependencies allow.

A cut between two stages is a downset: a set of works that holds, with each work, everything that must not come later.
Stage k is what the next downset has more. So the cuts are a path through the downsets, and dynamic programming over
pairs of them finds the best (as in Tarnawski et al., "Efficient Algorithms for Device Placement of DNN Graph
Operators", 2020). Graphs of models are narrow, with few more downsets than works. Where there are too many, the works
are taken in one order only, and the result says so.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from penstock.errors import ArgumentError
from penstock.plan.work_graph import WorkGraph

MOST_DOWNSETS = 4096
"""With more, the table of pairs would take too much memory and time."""

Floats = npt.NDArray[np.floating[Any]]
Ints = npt.NDArray[np.intp]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class GraphCut:
    """The best cut.

    Attributes:
        stages: the works on each device, by index, in the order of the devices; there may be fewer than devices.
        seconds: what the slowest stage, or link, takes.
        is_exact: no other cut is better. Otherwise only those along one order of the works were tried.
    """

    stages: tuple[tuple[int, ...], ...]
    seconds: float
    is_exact: bool


def cut_graph(
    graph: WorkGraph,
    devices: int,
    *,
    memory_limit: float = math.inf,
    in_flight: bool | Sequence[int] = False,
    beside: bool = False,
    below: float = math.inf,
    most: int | None = None,
) -> GraphCut | None:
    """Cuts the graph into at most `devices` stages, so that the slowest takes as little time as possible.

    >>> from penstock.plan import Work, WorkGraph, cut_graph
    >>> graph = WorkGraph.line([Work(3.0), Work(1.0), Work(1.0), Work(2.0)], [0.5, 0.0, 0.5])
    >>> cut_graph(graph, devices=2)
    GraphCut(stages=((0, 1), (2, 3)), seconds=4.0, is_exact=True)

    Args:
        graph: what is cut.
        devices: how many there are, in a row.
        memory_limit: of each device, in bytes.
        in_flight: a stage holds one microbatch for itself and each stage after it, as the first of p stages does under
            1F1B; otherwise one. Or how many each of all devices holds.
        beside: transfers take place while devices compute, all those over one cut one after another, so that the
            slowest stage or link counts. Otherwise a device's transfers add to its work.
        below: only look for cuts whose slowest stage takes less than this, which is faster.
        most: with more downsets, only one order of the works is tried; None: `MOST_DOWNSETS`.

    Returns None if no cut keeps all devices within their memory, or none is below.

    Raises:
        ArgumentError: there is no device or no work, or `order` of the graph has a circle.
    """
    if devices < 1 or not graph.works:
        raise ArgumentError(f"{len(graph.works)} works for {devices} devices: expected at least one of each")
    line = graph.topological()
    found = _downsets(graph, MOST_DOWNSETS if most is None else most)
    downsets = _prefixes(line) if found is None else found
    loads = _loads(graph, downsets, below, beside=beside)
    path = _best_path(loads, _Held.of(graph, downsets, memory_limit, _microbatches(in_flight, devices)), devices)
    if path is None:
        return None
    pairs = list(pairwise(path))
    stages = tuple(tuple(np.flatnonzero(downsets[after] & ~downsets[before]).tolist()) for before, after in pairs)
    return GraphCut(stages, max(float(loads[pair]) for pair in pairs), found is not None)


def stage_seconds(graph: WorkGraph, stages: Sequence[Sequence[int]]) -> list[float]:
    """How long each of these stages takes, transfers included."""
    found = []
    for stage in map(frozenset, stages):
        moved = (t.seconds for t in graph.transfers if not t.ends <= stage and not t.ends.isdisjoint(stage))
        found.append(sum(graph.works[work].seconds for work in stage) + sum(moved))
    return found


def _downsets(graph: WorkGraph, most: int) -> Bools | None:
    """All downsets as rows, smaller ones first; None if there are more than so many."""
    before = [0] * len(graph.works)
    for a, b in graph.order:
        before[b] |= (1 << a) & ~(1 << b)
    level, found = {0}, [0]
    while level:
        level = {
            done | 1 << work
            for done in level
            for work, needed in enumerate(before)
            if not done >> work & 1 and not needed & ~done
        }
        found += sorted(level)
        if len(found) > most:
            return None
    return np.array([[done >> work & 1 for work in range(len(before))] for done in found], dtype=bool)


def _prefixes(line: Sequence[int]) -> Bools:
    """The downsets along one order of the works."""
    return np.asarray(np.tri(len(line) + 1, len(line), -1, dtype=bool)[:, np.argsort(line)])


def _loads(graph: WorkGraph, downsets: Bools, bound: float, *, beside: bool) -> Floats:
    """How long the stage between two downsets takes, [lower, upper]; infinite unless the upper contains the lower, and
    where it is not below the bound."""
    done = downsets @ np.array([work.seconds for work in graph.works])
    loads = np.full((len(downsets), len(downsets)), np.inf)
    has = np.zeros((len(graph.transfers), len(graph.works)), dtype=bool)
    for row, transfer in zip(has, graph.transfers, strict=True):
        row[list(transfer.ends)] = True
    seconds = np.array([transfer.seconds for transfer in graph.transfers])
    crosses = _crosses(has, downsets)
    over_cut = crosses @ seconds
    ends = has.astype(np.float32)
    for lower, below in enumerate(downsets):
        near = lower + 1 + np.flatnonzero(done[lower + 1 :] - done[lower] < bound)
        above = near[downsets[np.ix_(near, np.flatnonzero(below))].all(axis=1)]
        work = done[above] - done[lower]
        if beside:
            loads[lower, above] = np.maximum(work, over_cut[above])
        else:
            open_ = np.flatnonzero(crosses[lower])
            inside = downsets[above] & ~below
            used = inside.astype(np.float32) @ ends[open_].T > 0  # of those over the lower cut, what ends on the stage
            goes_on = crosses[np.ix_(above, open_)]
            moved = over_cut[above] + (used.astype(float) - goes_on) @ seconds[open_]
            loads[lower, above] = work + moved
    loads[loads >= bound] = np.inf
    return loads


def _crosses(has: Bools, downsets: Bools) -> Bools:
    """Whether a transfer has ends on both sides of a downset's cut, [downset, transfer]."""
    ends = has.T.astype(np.float32)  # numpy multiplies these far faster than truth values
    below = downsets.astype(np.float32) @ ends
    return np.asarray((below > 0) & (below < ends.sum(axis=0)))


@dataclass(frozen=True, slots=True)
class _Held:
    """What each downset holds, by kind, against the limit of one device."""

    microbatch: Floats
    fixed: Floats
    limit: float
    in_flight: Ints
    """Microbatches on the first of so many stages."""

    @classmethod
    def of(cls, graph: WorkGraph, downsets: Bools, limit: float, in_flight: Ints) -> Self:
        works = graph.works
        return cls(
            downsets @ np.array([work.microbatch_bytes for work in works]),
            downsets @ np.array([work.fixed_bytes for work in works]),
            limit,
            in_flight,
        )

    def fits(self, lower: Ints | int, upper: Ints, stages: Floats | Ints) -> Bools:
        """Whether a stage between two downsets fits if it is the first of so many, for each of several."""
        if self.limit == math.inf:
            return np.ones(len(upper), dtype=bool)
        microbatch = (self.microbatch[upper] - self.microbatch[lower]) * self.in_flight[stages.astype(np.intp)]
        return np.asarray(microbatch + self.fixed[upper] - self.fixed[lower] <= self.limit)


def _microbatches(in_flight: bool | Sequence[int], devices: int) -> Ints:
    """How many microbatches the first of so many stages holds."""
    if isinstance(in_flight, bool):
        return np.arange(devices + 1) if in_flight else np.ones(devices + 1, dtype=np.intp)
    return np.array([0, *reversed(in_flight)])


def _best_path(loads: Floats, held: _Held, devices: int) -> list[int] | None:
    """The downsets between which the best stages lie, from nothing to all; None if no path fits.

    Among the cuts with the same slowest stage, that with the smallest sum of squares, so that the other stages are
    balanced, too.
    """
    limits = np.unique(loads[loads < np.inf])
    enough = bisect_left(limits, True, key=lambda limit: _fewest(loads, held, limit, devices) <= devices)
    return None if enough == len(limits) else _smoothest(loads, held, devices, limits[enough])


def _fewest(loads: Floats, held: _Held, limit: float, most: int) -> float:
    """The fewest stages of which none takes longer than a limit; infinite if there are more than so many."""
    fewest = np.full(len(loads), np.inf)
    fewest[-1] = 0
    for lower in range(len(loads) - 2, -1, -1):
        after = np.flatnonzero((loads[lower] <= limit) & (fewest < most))
        stages = fewest[after] + 1
        fewest[lower] = stages[held.fits(lower, after, stages)].min(initial=np.inf)
    return float(fewest[0])


def _smoothest(loads: Floats, held: _Held, devices: int, limit: float) -> list[int]:
    """The path of at most so many stages, none longer than the limit, with the smallest sum of squares."""
    lower, upper = np.nonzero(loads <= limit)
    begins = np.flatnonzero(np.diff(lower, prepend=-1))
    squares = loads[lower, upper] ** 2
    rest = np.full(len(loads), np.inf)
    rest[-1] = 0.0
    sums, chosen = [], []
    for stages in range(1, devices + 1):
        total = np.where(held.fits(lower, upper, np.array(stages)), squares + rest[upper], np.inf)
        rest = np.full(len(loads), np.inf)
        rest[lower[begins]] = np.minimum.reduceat(total, begins)
        chosen.append(dict(zip(*(ends[total == rest[lower]][::-1].tolist() for ends in (lower, upper)), strict=True)))
        sums.append(float(rest[0]))
    path = [0]
    for after in reversed(chosen[: int(np.argmin(sums)) + 1]):
        path.append(after[path[-1]])
    return path
