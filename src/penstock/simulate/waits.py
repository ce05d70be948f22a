"""Why ranks wait: the cause of each gap in a timeline, and the chain of actions that determines its length.

Both use only the timeline and the dependencies of its actions, so they explain simulated and real runs alike.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from dataclasses import dataclass
from enum import Enum

import numpy as np

from penstock._base.errors import ArgumentError
from penstock.schedule import Op, Row, Schedule
from penstock.schedule.timeline import Span, Timeline
from penstock.simulate.computations import IS_COMPUTE, Columns, Floats, Ints, column


class IdleCause(Enum):
    """Why a rank computes nothing. The value is the name in tables and JSON."""

    WARM_UP = "warm-up"
    FORWARD = "waiting for forward"
    BACKWARD = "waiting for backward"
    LINK = "link"
    OTHER = "other"
    COOL_DOWN = "cool-down"


def idle_time_by_cause(schedule: Schedule, timeline: Timeline) -> list[dict[IdleCause, float]]:
    """Return, for each rank, its idle seconds by cause; together with its work they add up to the makespan.

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
    return Waits.from_timeline(schedule, timeline).idle()


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
        """Return the seconds that the path spends in one op."""
        return sum(s.end_seconds - s.start_seconds for s in self.spans if s.action.op is op)


def critical_path(schedule: Schedule, timeline: Timeline) -> CriticalPath:
    """Return the critical path of a timeline: from its last end backwards, each time to what the action had waited for.

    Args and errors as for `idle_time_by_cause`.
    """
    return Waits.from_timeline(schedule, timeline).critical_path()


@dataclass(frozen=True, slots=True)
class Waits:
    """What ranks wait for in a schedule as it ran, for both `idle` and `critical_path`.

    Attributes:
        starts, ends: of each rank's nodes.
        need: what each node waited for on another rank: for the first of two that overlap, the later of their needs.
    """

    columns: Columns
    makespan_seconds: float
    starts: list[Floats]
    ends: list[Floats]
    need: Ints

    @classmethod
    def from_timeline(cls, schedule: Schedule, timeline: Timeline, columns: Columns | None = None) -> Waits:
        """Find what ranks wait for. `columns`: those of the timeline's actions, if they have been built already."""
        if timeline.serialized:
            raise ArgumentError(
                "this timeline is of ranks that took turns in one process, which says nothing of who waits for whom; "
                "pass one of a run with a process for each rank, or a simulated one"
            )
        tracks = timeline.tracks
        if columns is None:
            columns = Columns.from_schedule(schedule.with_rows(track.actions for track in tracks))
        starts, ends = (
            [_computation_times(track.actions, getattr(track, name)) for track in tracks] for name in ("start", "end")
        )
        need = columns.need
        if len(columns.joined):
            first, second = need[columns.joined], need[columns.joined + 1]
            end = np.concatenate(ends)
            need = need.copy()
            need[columns.joined] = np.where((second >= 0) & ((first < 0) | (end[second] > end[first])), second, first)
        return cls(columns, timeline.makespan_seconds, starts, ends, need)

    def idle(self) -> list[dict[IdleCause, float]]:
        """Return the idle seconds; see `idle_time_by_cause`."""
        columns, departures, makespan = self.columns, self._departures(), self.makespan_seconds
        report = []
        for rank, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            if not len(start):
                report.append(dict.fromkeys(IdleCause, 0.0) | {IdleCause.WARM_UP: makespan})
                continue
            need, previous_end = self.need[columns.nodes(rank)][1:], end[:-1]
            gap = np.maximum(start[1:] - previous_end, 0.0)
            departure = np.clip(np.where(need >= 0, departures[need], previous_end), previous_end, start[1:])
            output_wait, link_wait = departure - previous_end, gap - (departure - previous_end)
            needs, forward = need >= 0, columns.op[need] == Op.F.code
            report.append(
                {
                    IdleCause.WARM_UP: float(start[0]),
                    IdleCause.FORWARD: float(output_wait[needs & forward].sum()),
                    IdleCause.BACKWARD: float(output_wait[needs & ~forward].sum()),
                    IdleCause.LINK: float(link_wait[needs].sum()),
                    IdleCause.OTHER: float(gap[~needs].sum()),
                    IdleCause.COOL_DOWN: float(makespan - end[-1]),
                }
            )
        return report

    def critical_path(self) -> CriticalPath:
        """Return the critical path; see `critical_path`."""
        joined, first = set(self.columns.joined.tolist()), self.columns.first.tolist()
        spans: list[Span] = []
        node, link = self._last_node(), 0.0
        while node >= 0:
            rank = bisect_right(first, node) - 1
            index = node - first[rank]
            start, end = float(self.starts[rank][index]), float(self.ends[rank][index])
            previous_end = float(self.ends[rank][index - 1]) if index else 0.0
            if spans:
                link += spans[-1].start_seconds - end
            spans.append(Span(rank, self.columns.rows[rank][index], start, end, start - previous_end))
            # Either the rank was busy with the previous action until this one could start, or it waited for the other
            # rank's.
            needed = int(self.need[node])
            waited = needed >= 0 and start > previous_end
            node = needed if waited else node - 1 if index else -1
            if waited and needed in joined:
                node += 1  # the output of two overlapping actions left when both had ended
        link += spans[-1].start_seconds if spans else 0.0
        return CriticalPath(tuple(reversed(spans)), link)

    def _last_node(self) -> int:
        """Return the first of the nodes that end last; -1 if there are none."""
        latest, last_node = -1.0, -1
        for rank, ends in enumerate(self.ends):
            index = int(np.argmax(ends)) if len(ends) else -1
            if index >= 0 and ends[index] > latest:
                latest, last_node = float(ends[index]), int(self.columns.first[rank]) + index
        return last_node

    def _departures(self) -> Floats:
        """Return when the output of each node leaves: at its end, or when the node that overlaps with it has ended
        too."""
        departures = np.concatenate(self.ends)
        departures[self.columns.joined] = departures[self.columns.joined + 1]
        return departures


def _computation_times(actions: Row, times: array[float]) -> Floats:
    """Return the times of a track's computations: a view, if it has nothing else."""
    computes = IS_COMPUTE[column(actions.op)]
    return column(times) if computes.all() else column(times)[computes]
