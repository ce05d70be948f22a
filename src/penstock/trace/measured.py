"""Events -> steps: for each replica of a step the order in which its ranks worked, and when, on one clock."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice, starmap
from operator import eq

import numpy as np

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.schedule import Op, Placement, Row, Schedule, check, summary
from penstock.schedule.generators import ScheduleParams, schedule_specs
from penstock.schedule.timeline import Timeline, check_index_range
from penstock.simulate.computations import Columns
from penstock.trace.clocks import arrival_tolerance, clock_offsets
from penstock.trace.event import Event, TraceData
from penstock.trace.outside_pipeline import KNOWN
from penstock.trace.runs.about import RunInfo

_MAX_PROCESSES = 10_000
_MAX_COMPARED = 200_000
"""Schedules of more actions are not compared with those that have a name."""
_MAX_NAMED = 8
"""Maximum number of missing stages to name."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One pipeline in one step.

    Attributes:
        number: which replica.
        schedule: the order in which each rank ran its actions; named, if it is that of a generator.
        timeline: when; its clock starts with the first action.
        begin_seconds: of that clock, after the begin of the step.
    """

    number: int
    schedule: Schedule
    timeline: Timeline
    begin_seconds: float

    @property
    def span_seconds(self) -> float:
        return self.timeline.makespan_seconds


@dataclass(frozen=True, slots=True)
class Step:
    """One step of training.

    Attributes:
        number: as the trace has it.
        replicas: those that are complete, in order.
        seconds: from the first event's start to the last one's end, whatever they are.
        events: everything that its ranks did, on one clock; empty where clocks were set right, as that is done by what
            computes alone.
    """

    number: int
    replicas: tuple[Replica, ...]
    seconds: float
    events: tuple[Event, ...]

    @property
    def others(self) -> Mapping[str, float]:
        """Other ops of ranks, such as collectives and the optimizer: the name, and the seconds from the start of the
        last one until all had ended; longest first.
        """
        groups: defaultdict[str, list[Event]] = defaultdict(list)
        for event in self.events:
            if event.action is None:
                groups[event.name].append(event)
        spent = {
            name: max(event.end_seconds for event in group) - max(event.start_seconds for event in group)
            for name, group in groups.items()
        }
        return dict(sorted(spent.items(), key=lambda item: -item[1]))

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of ops for which it is unknown which ranks waited for each other."""
        return tuple(name for name in self.others if name not in KNOWN)

    @property
    def numbered(self) -> list[Event]:
        """The events, with a replica's place among the complete ones as its number."""
        indices = {replica.number: index for index, replica in enumerate(self.replicas)}
        renumbered = {number for number, index in indices.items() if number != index}
        return [replace(e, replica=indices[e.replica or 0]) if e.replica in renumbered else e for e in self.events]

    @property
    def overlap(self) -> float:
        """The share of all actions' time in which another rank computes, too."""
        tracks = [track for item in self.replicas for track in item.timeline.tracks]
        starts, ends = (np.sort(np.concatenate([getattr(item, name) for item in tracks])) for name in ("start", "end"))
        return float(np.maximum(ends[:-1] - starts[1:], 0.0).sum() / ((ends - starts).sum() or 1.0))

    @property
    def pipeline_seconds(self) -> float:
        """From the first action's start to the last one's end."""
        return max(replica.begin_seconds + replica.span_seconds for replica in self.replicas) - min(
            replica.begin_seconds for replica in self.replicas
        )

    @property
    def slowest(self) -> Replica:
        """The replica that ends last."""
        return max(self.replicas, key=lambda replica: replica.begin_seconds + replica.span_seconds)


@dataclass(frozen=True, slots=True)
class TraceSteps:
    """The complete steps of a trace, what was left out or set right, whether ranks shared cores, and its run."""

    steps: tuple[Step, ...]
    notes: tuple[str, ...]
    crowded: bool | None = None
    about: RunInfo | None = None

    @property
    def typical(self) -> Step:
        """The step whose time is the median."""
        return sorted(self.steps, key=lambda step: step.seconds)[(len(self.steps) - 1) // 2]


def steps_of_trace(recording: TraceData) -> TraceSteps:
    """Return the steps of a recording.

    Raises:
        ArgumentError: no step has one complete replica: names the missing or misplaced rank or action; or there
            is no backward at all.
    """
    ops = [event.action.op for event in recording.events if event.action is not None and event.action.op.is_compute]
    if ops and not any(op in (Op.B, Op.I) for op in ops):
        raise ArgumentError(
            f"{pluralize(len(ops), 'action')}, and no backward (B or I) among them: this is an evaluation, or a trace "
            "of forwards only; pass that of a training step"
        )
    check_index_range(event.action for event in recording.events if event.action is not None)
    if (sources := len({event.source for event in recording.events})) > _MAX_PROCESSES:
        raise ArgumentError(f"{sources:,} processes; expected at most {_MAX_PROCESSES:,}")
    events = _locate_events(recording.events)
    groups: defaultdict[int, defaultdict[int, list[Event]]] = defaultdict(lambda: defaultdict(list))
    events_by_step: defaultdict[int, list[Event]] = defaultdict(list)
    for event in events:
        events_by_step[event.step or 0].append(event)
        if event.computes:
            groups[event.step or 0][event.replica or 0].append(event)
    steps, notes, incomplete = [], list(recording.notes), []
    stages = max(recording.stages, 1 + max(event.action.stage for event in events if event.action is not None))
    for number, by_replica in sorted(groups.items()):
        replicas, corrected = [], recording.with_waits
        for replica, group in sorted(by_replica.items()):
            built = _describe_missing(group, stages) or _build_replica(replica, group, with_waits=recording.with_waits)
            if isinstance(built, str):
                incomplete.append((number, replica, built))
                continue
            replicas.append(built[0])
            notes += built[1]
            corrected = corrected or built[2]
        if replicas:
            steps.append(_build_step(number, replicas, () if corrected else events_by_step[number]))
    if not steps:
        raise ArgumentError("; ".join([f"the trace has no complete step: {incomplete[0][2]}", *recording.notes]))
    if incomplete:
        number, replica, problem = incomplete[0]
        notes.append(
            f"left out {pluralize(len(incomplete), 'pipeline')}, the first in step {number}, replica {replica}: "
            f"{problem}"
        )
    ranks = max(step.slowest.schedule.ranks for step in steps)
    if outside := [event.rank or 0 for event in events if not event.computes and (event.rank or 0) >= ranks]:
        dropped = pluralize(len(outside), "event")
        notes.append(f"left out {dropped} of ranks that have no actions, such as rank {outside[0]}")
    shapes = {(step.slowest.schedule.name, step.slowest.schedule.microbatches): step.number for step in reversed(steps)}
    if len(shapes) > 1:
        (name, count), *others = sorted(shapes, key=lambda shape: shapes[shape])
        differing = ", ".join(f"step {shapes[shape]} {shape[0]} with {shape[1]}" for shape in others[:_MAX_NAMED])
        notes.append(
            f"steps differ: step {shapes[name, count]} is {name} with {pluralize(count, 'microbatch')}, {differing}; "
            "if they are of several runs, explain each alone"
        )
    return TraceSteps(tuple(steps), tuple(dict.fromkeys(notes)), recording.crowded, recording.about)


def _locate_events(events: Sequence[Event]) -> list[Event]:
    """Return the events, each with its step, rank and replica."""
    stages: defaultdict[tuple[int | str, ...], set[int]] = defaultdict(set)
    for event in events:
        if event.action is not None and event.computes:
            stages[event.source].add(event.action.stage)
    ranks = {owned: rank for rank, owned in enumerate(sorted({tuple(sorted(owned)) for owned in stages.values()}))}
    positions: dict[tuple[int | str, ...], tuple[int, int]] = {}
    replicas: defaultdict[int, int] = defaultdict(int)
    for source in sorted(stages):
        rank = ranks[tuple(sorted(stages[source]))]
        positions[source] = rank, replicas[rank]
        replicas[rank] += 1
    occurrences: defaultdict[tuple[object, ...], int] = defaultdict(int)
    located = []
    for event in events:
        rank, replica = positions.get(event.source, (0, 0))
        rank = rank if event.rank is None else event.rank
        replica = replica if event.replica is None else event.replica
        step = event.step
        if step is None:
            step = occurrences[event.source, event.action or event.name]
            occurrences[event.source, event.action or event.name] += 1
        times = event.start_seconds, event.end_seconds
        located.append(Event(event.source, event.name, *times, event.action, step, rank, replica))
    return located


def _describe_missing(events: Sequence[Event], stages: int) -> str:
    """Return which ranks or stages have no events; empty if all have."""
    present = {event.action.stage for event in events if event.action is not None}
    ranks = {event.rank or 0 for event in events}
    if missing := sorted(set(range(max(ranks))) - ranks):
        names = ", ".join(map(str, missing))
        return f"rank {names} has no actions, and there are ranks up to {max(ranks)}; pass the trace of every rank"
    if missing := list(islice((stage for stage in range(stages) if stage not in present), _MAX_NAMED)):
        names = ", ".join(map(str, missing))
        return f"no rank has stage {names}, and there are stages up to {stages - 1}; pass the trace of every rank"
    return ""


def _build_replica(number: int, events: Sequence[Event], *, with_waits: bool) -> tuple[Replica, list[str], bool] | str:
    """Build one pipeline on one clock, which starts with the trace's own: return it, notes, and whether clocks were
    corrected; or what is wrong with it."""
    rows: list[list[Event]] = [[] for _ in range(1 + max(event.rank or 0 for event in events))]
    for event in sorted(events, key=lambda event: (event.start_seconds, event.end_seconds)):
        rows[event.rank or 0].append(event)
    schedule = _traced_schedule(rows)
    if isinstance(schedule, str):
        return schedule
    columns = Columns.from_schedule(schedule)
    starts = np.array([event.start_seconds for row in rows for event in row])
    ends = np.array([event.end_seconds for row in rows for event in row])
    if not (ends > starts).any():
        return "none of its actions takes any time"
    slack = arrival_tolerance(starts, ends)
    offsets = clock_offsets(columns, starts, ends, with_waits=with_waits)
    node_offsets = np.repeat(offsets, np.diff(columns.first))
    starts, ends = starts + node_offsets, ends + node_offsets
    notes = []
    if any(offsets):
        worst = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
        difference = f"{abs(offsets[worst]):.6g} s {'behind' if offsets[worst] > 0 else 'ahead of'}"
        notes.append(
            f"the clocks of replica {number}'s ranks disagree: rank {worst}'s is {difference} rank 0's; all are set "
            "right by their messages, taken to be as fast there as back"
        )
    if with_waits:
        users = np.flatnonzero(columns.need >= 0)
        starts[users] = np.clip(ends[columns.need[users]], starts[users], ends[users])
    inner = np.delete(np.arange(1, len(starts)), columns.first[1:-1] - 1)  # not the first of a rank
    overlap = ends[inner - 1] - starts[inner]
    if overlap.max(initial=0.0) > slack:
        notes.append(f"some actions of one rank overlap; each counts from the end of the one before (replica {number})")
    starts[inner] = np.clip(ends[inner - 1], starts[inner], np.maximum(ends[inner], starts[inner]))
    ends = np.maximum(starts, ends)
    begin = float(starts.min())
    starts, ends = starts - begin, ends - begin
    times = starts, ends, np.maximum(0.0, starts - np.nan_to_num(columns.previous_ends(ends)))
    rank_columns = [[column[columns.nodes(rank)].tolist() for column in times] for rank in range(schedule.ranks)]
    return Replica(number, schedule, Timeline.from_columns(schedule.rows, rank_columns), begin), notes, any(offsets)


def _traced_schedule(rows: Sequence[Sequence[Event]]) -> Schedule | str:
    """Return what each rank did in order, or what is missing or out of order."""
    actions = [[event.action for event in row if event.action is not None] for row in rows]
    owners = {action.stage: rank for rank, row in enumerate(actions) for action in row}
    numbers: defaultdict[int, set[int]] = defaultdict(set)
    for row in actions:
        for action in row:
            numbers[action.stage].add(action.microbatch or 0)
    pipelines = 2 if len(owners) % 2 == 0 and not numbers[0] & numbers[len(owners) // 2] else 1
    placement = Placement(len(rows), tuple(owners[stage] for stage in sorted(owners)), pipelines)
    return _check_and_name(Schedule("as traced", placement, 1 + max(map(max, numbers.values())), map(Row, actions)))


@lru_cache(maxsize=8)
def _check_and_name(schedule: Schedule) -> Schedule | str:
    """Return the schedule under the name of the generator that makes it, if one does; or what is wrong with it."""
    fatal = [violation for violation in check(schedule) if violation.fatal]
    if fatal:
        return summary(fatal, most=2)
    placement = schedule.placement
    if sum(map(len, schedule.rows)) > _MAX_COMPARED:
        return schedule
    chunks = placement.stages // placement.ranks // placement.pipelines
    numbers = ScheduleParams(placement.ranks, schedule.microbatches, chunks)
    for entry in schedule_specs():
        if entry.fits(numbers, placement):
            generated = entry.make(numbers)
            if all(starmap(_same_actions, zip(generated.rows, schedule.rows, strict=True))):
                return replace(schedule, name=generated.name)
    return schedule


def _same_actions(planned: Row, run: Row) -> bool:
    """Whether a rank ran what was planned. A trace does not show which two actions were to overlap."""
    return len(planned) == len(run) and all(map(eq, planned, run))


def _build_step(number: int, replicas: Sequence[Replica], events: Sequence[Event]) -> Step:
    """Build a step of all replicas on one clock, which begins with its first event."""
    ranks = {r.number: r.schedule.ranks for r in replicas}
    relevant = tuple(event for event in events if (event.rank or 0) < ranks.get(event.replica or 0, 0))
    zero = min([r.begin_seconds for r in replicas] + [event.start_seconds for event in relevant])
    latest = max([r.begin_seconds + r.span_seconds for r in replicas] + [event.end_seconds for event in relevant])
    shifted = tuple(replace(r, begin_seconds=r.begin_seconds - zero) for r in replicas)
    return Step(number, shifted, latest - zero, relevant)
