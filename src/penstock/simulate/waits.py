"""Why ranks wait: the cause of each gap in a timeline, and the chain of actions that determines its length.

Both use only the timeline and the dependencies of its actions, so they explain simulated and real runs alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np

from penstock.errors import ArgumentError
from penstock.schedule import Op, Schedule
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate.columns import Columns, Floats, Ints


class Cause(Enum):
    """Why a rank computes nothing. The value is the name in tables and JSON."""

    WARM_UP = "warm-up"
    FORWARD = "waiting for forward"
    BACKWARD = "waiting for backward"
    LINK = "link"
    OTHER = "other"
    COOL_DOWN = "cool-down"


def idle(schedule: Schedule, timeline: Timeline) -> list[dict[Cause, float]]:
    """For each rank, how many seconds it idled for which cause; together with its work these add up to the makespan.

    Before its first action a rank warms up; after its last one it cools down. In between, before an action that needs
    another rank's F (or B, or I), it waits for that forward (backward) until it has ended, and from then on for the
    link. The rest, such as a real rank that was merely slow to continue, is "other".

    Args:
        schedule: the one that the timeline shows; messages make no difference.
        timeline: simulated or real.

    Raises:
        ScheduleError: the schedule cannot be run.
        ArgumentError: ranks took turns in one process, so none waited for another.
    """
    columns, starts, ends = _columns(schedule, timeline)
    before = _ends_before(columns, ends)
    gap = np.maximum(starts - before, 0.0)
    need = _binding(columns, ends)
    reached = np.clip(np.where(need >= 0, _leaving(columns, ends)[need], before), before, starts)
    until, rest = reached - before, gap - (reached - before)
    forward = np.isin(columns.op[need], [Op.F.code])
    makespan = timeline.makespan_seconds
    report = []
    for rank in range(timeline.ranks):
        part = slice(int(columns.first[rank]), int(columns.first[rank + 1]))
        if part.start == part.stop:
            report.append(dict.fromkeys(Cause, 0.0) | {Cause.WARM_UP: makespan})
            continue
        later = slice(part.start + 1, part.stop)
        needs = need[later] >= 0
        report.append(
            {
                Cause.WARM_UP: float(starts[part.start]),
                Cause.FORWARD: float(until[later][needs & forward[later]].sum()),
                Cause.BACKWARD: float(until[later][needs & ~forward[later]].sum()),
                Cause.LINK: float(rest[later][needs].sum()),
                Cause.OTHER: float(gap[later][~needs].sum()),
                Cause.COOL_DOWN: float(makespan - ends[part.stop - 1]),
            }
        )
    return report


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """The chain of actions that ends last: shortening any of them shortens the run, unless another chain is as long.

    Attributes:
        spans: the actions, in order.
        link_seconds: how long the path spent between ranks, or otherwise between two actions.
    """

    spans: tuple[Span, ...]
    link_seconds: float

    def seconds(self, op: Op) -> float:
        """How long the path spends in one op."""
        return sum(s.end_seconds - s.start_seconds for s in self.spans if s.action.op is op)


def critical_path(schedule: Schedule, timeline: Timeline) -> CriticalPath:
    """The critical path of a timeline: from its last end backwards, each time to what the action had waited for.

    Args and errors as for `idle`.
    """
    columns, starts, ends = _columns(schedule, timeline)
    before = _ends_before(columns, ends)
    need = _binding(columns, ends)
    first = set(columns.first.tolist())
    path: list[int] = []
    node = int(np.argmax(ends)) if len(ends) else -1
    link = 0.0
    while node >= 0:
        path.append(node)
        other = int(need[node])
        # Either the rank was busy with the previous action until this one could start, or it waited for the other
        # rank's.
        waited = other >= 0 and starts[node] > before[node]
        previous = other if waited else node - 1 if node not in first else -1
        if waited and columns.joined[other]:
            previous += 1  # the output of two overlapping actions left when both had ended
        link += float(starts[node] - (ends[previous] if previous >= 0 else 0.0))
        node = previous
    spans = []
    for node in reversed(path):
        rank = int(columns.rank[node])
        action = columns.rows[rank][node - int(columns.first[rank])]
        spans.append(Span(rank, action, float(starts[node]), float(ends[node]), float(starts[node] - before[node])))
    return CriticalPath(tuple(spans), link)


def _columns(schedule: Schedule, timeline: Timeline) -> tuple[Columns, Floats, Floats]:
    """The schedule as it was run, with the start and end of each node."""
    if timeline.in_turns:
        raise ArgumentError(
            "this timeline is of ranks that took turns in one process, which says nothing of who waits for whom; give "
            "one of a run with a process for each rank, or a simulated one"
        )
    tracks = timeline.tracks
    columns = Columns.of(schedule.with_rows(track.actions for track in tracks))
    codes = [op.code for op in Op if op.is_compute]
    keep = np.concatenate([np.isin(np.frombuffer(t.actions.op, dtype=t.actions.op.typecode), codes) for t in tracks])
    starts = np.concatenate([np.frombuffer(track.start) for track in tracks])[keep]
    ends = np.concatenate([np.frombuffer(track.end) for track in tracks])[keep]
    return columns, starts, ends


def _ends_before(columns: Columns, ends: Floats) -> Floats:
    """When the previous action on each node's rank ended; 0 for the first."""
    before = np.concatenate([[0.0], ends[:-1]])[: len(ends)]
    before[columns.first[:-1][np.diff(columns.first) > 0]] = 0.0
    return np.asarray(before)


def _leaving(columns: Columns, ends: Floats) -> Floats:
    """When the output of each node leaves: at its end, or when the node that overlaps with it has ended too."""
    pairs = np.flatnonzero(columns.joined)
    leaving = ends.copy()
    leaving[pairs] = ends[pairs + 1]
    return leaving


def _binding(columns: Columns, ends: Floats) -> Ints:
    """What each node waited for on another rank: for two overlapping nodes, the later of their needs."""
    need = columns.need.copy()
    for node in np.flatnonzero(columns.joined).tolist():
        one, two = need[node], need[node + 1]
        if two >= 0 and (one < 0 or ends[two] > ends[one]):
            need[node] = two
    return need
