"""Where a step's time went: from an ideal step to the measured one, each cause added to those before it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from penstock.plan.explain.factors import ALIKE_FRACTION, Factors
from penstock.plan.explain.replay import Replay, start_end_times
from penstock.schedule import Action
from penstock.schedule.timeline import Timeline
from penstock.simulate.computations import Columns, Floats, Ints
from penstock.simulate.waits import Waits
from penstock.trace.measured import Replica, Step


class TimeCategory(StrEnum):
    """What a step's time, or a rank's idle time, is due to. The value is the name in tables and JSON."""

    SCHEDULE = "warm-up and drain"
    STAGES = "uneven stages"
    RANKS = "slow ranks"
    MICROBATCHES = "unequal microbatches"
    ACTIONS = "outlier actions"
    LINKS = "communication"
    HOST = "host overhead"
    REST = "unexplained"


@dataclass(frozen=True, slots=True)
class RankBreakdown:
    """Where one rank's time went: `compute_seconds` and `idle_seconds` add up to its pipeline's span."""

    rank: int
    compute_seconds: float
    idle_seconds: Mapping[TimeCategory, float]


@dataclass(frozen=True, slots=True)
class TimeBreakdown:
    """Where the time went.

    Attributes:
        even_seconds: the pipeline's time with stages, ranks and microbatches alike and nothing between actions.
        added_seconds: what each reason adds, in the order in which they were added; may be below 0. What is unexplained
            is the measured time less the replay's.
        ranks: of the slowest replica.
    """

    even_seconds: float
    added_seconds: Mapping[TimeCategory, float]
    ranks: tuple[RankBreakdown, ...]


def break_down(step: Step, factors: Factors, replay: Replay) -> TimeBreakdown:
    """Break a step down by the cases from an ideal step to the replay; the measured step is the last."""
    free = replay.without_gaps
    cases = {
        TimeCategory.SCHEDULE: free.with_seconds(factors.even),
        TimeCategory.STAGES: free.with_seconds(factors.by_stage),
        TimeCategory.RANKS: free.with_seconds(factors.by_rank),
        TimeCategory.MICROBATCHES: free.with_seconds(factors.by_microbatch),
        TimeCategory.ACTIONS: free,
        TimeCategory.LINKS: replay.without_host(),
        TimeCategory.HOST: replay,
    }
    times = [replay.pipeline_seconds for replay in cases.values()] + [step.pipeline_seconds]
    names = [*[*cases][1:], TimeCategory.REST]
    added = {name: after - before for name, before, after in zip(names, times, times[1:], strict=False)}
    index = step.replicas.index(step.slowest)
    busy = [step.slowest.timeline.busy_seconds(rank) for rank in range(step.slowest.timeline.ranks)]
    by_rank, idle = step.slowest.schedule.placement.by_rank, []  # of each rank: its pipeline's span less its own work
    for replay in cases.values():
        work = np.nansum(replay.seconds[index], axis=(0, 2))  # by stage
        idle.append([replay.spans[index] - float(work[list(stages)].sum()) for stages in by_rank])
    idle += [[step.slowest.span_seconds - seconds for seconds in busy]]
    ranks = tuple(
        RankBreakdown(rank, busy[rank], _divide_idle_time([*TimeCategory], [by_case[rank] for by_case in idle]))
        for rank in range(len(busy))
    )
    return TimeBreakdown(times[0], added, ranks)


def _divide_idle_time(reasons: Sequence[TimeCategory], idle: Sequence[float]) -> dict[TimeCategory, float]:
    """Divide a rank's idle time among the categories, none below 0: a rank with more work idles less, which comes off
    the categories before."""
    shares = dict.fromkeys(reasons, 0.0)
    before = 0.0
    for index, (reason, seconds) in enumerate(zip(reasons, idle, strict=True)):
        added, before = seconds - before, seconds
        shares[reason] = max(0.0, added)
        for earlier in reversed(reasons[:index]):
            if added >= 0:
                break
            reduction = min(shares[earlier], -added)
            shares[earlier] -= reduction
            added += reduction
    return shares


@dataclass(frozen=True, slots=True)
class Bubble:
    """The wait between two actions of a rank that is longest beyond what the schedule itself makes it wait there.

    Attributes:
        rank, before: where it was, and the action that came after it.
        seconds: how long it lasted.
        blocked_by: the action that at least half of the wait was for; None: there is none, or it took hardly more than
            an even share.
        blocked_by_rank, blocked_by_seconds, usual_seconds: where that ran, how long it took, and the even share.
    """

    rank: int
    before: Action
    seconds: float
    blocked_by: Action | None = None
    blocked_by_rank: int = 0
    blocked_by_seconds: float = 0.0
    usual_seconds: float = 0.0


def find_largest_bubble(replica: Replica, ideal: Timeline) -> Bubble | None:
    """Return the largest bubble of a replica apart from warm-up and drain; None if there is none.

    Args:
        replica: as measured.
        ideal: its schedule with stages, ranks and microbatches alike, and nothing between actions.
    """
    waits = Waits.from_timeline(replica.schedule, replica.timeline)
    columns = waits.columns
    starts, ends = np.concatenate(waits.starts), np.concatenate(waits.ends)
    ideal_starts, ideal_ends = start_end_times(ideal)
    gap = np.nan_to_num(starts - columns.previous_ends(ends))
    node = int(np.argmax(gap - np.nan_to_num(ideal_starts - columns.previous_ends(ideal_ends))))
    if gap[node] <= 0:
        return None
    rank = columns.rank
    took, usual = ends - starts, ideal_ends - ideal_starts
    location = int(rank[node]), columns.action(node), float(gap[node])
    blocker = _find_blocker(waits.need, columns, starts, ends, node)
    if blocker < 0 or took[blocker] < (1 + ALIKE_FRACTION) * usual[blocker]:
        return Bubble(*location)
    return Bubble(*location, columns.action(blocker), int(rank[blocker]), float(took[blocker]), float(usual[blocker]))


def _find_blocker(need: Ints, columns: Columns, starts: Floats, ends: Floats, node: int) -> int:
    """Return, of all nodes that a node's rank waited for, the one that took half of the wait or more; -1: none did."""
    idle_start, current = ends[node - 1], int(need[node])
    first = set(columns.first.tolist())
    while current >= 0 and ends[current] > idle_start:
        if 2 * (ends[current] - max(starts[current], idle_start)) >= starts[node] - idle_start:
            return current
        previous = -1 if current in first else current - 1
        source = int(need[current])
        source_end = ends[source] if source >= 0 else -np.inf
        previous_end = ends[previous] if previous >= 0 else -np.inf
        current = source if source_end > previous_end else previous
    return -1
