"""The work of ranks before and after their pipelines, alone or together, and the seconds of all ops of a traced step.

An op that several ranks do together lasts, on each, as long as it waits for the others. What it costs is the time from
when the last of them has begun: the remaining time is due to slower ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from penstock._base.errors import ArgumentError
from penstock.schedule import Op, Schedule
from penstock.simulate.computations import Floats
from penstock.trace.event import Event

FORWARD, BACKWARD = "forward", "backward"
FORWARD_MESSAGE, BACKWARD_MESSAGE = "forward-message", "backward-message"
PIPELINE = (FORWARD, BACKWARD, FORWARD_MESSAGE, BACKWARD_MESSAGE)
"""The names of what a pipeline does: a message is its sender's, which waits until it has arrived."""

Durations = Mapping[str, Floats]
"""Seconds of each op, by name: those of `PIPELINE` by replica, rank and microbatch, those of a `Joint`
by replica and rank. NaN where there is none: a message from the first or last rank, a rank that takes no part.
"""


class Among(Enum):
    """Which ranks wait for each other before they begin a `Joint`."""

    NOBODY = "each rank for itself"
    REPLICAS = "the same rank of all replicas"
    PIPELINE = "the ranks of a replica"
    ALL = "all ranks of all replicas"


KNOWN: Mapping[str, Among] = {
    "params-all-gather": Among.REPLICAS,
    "layernorm-grads-all-reduce": Among.NOBODY,
    "embedding-grads-all-reduce": Among.PIPELINE,
    "grads-reduce-scatter": Among.REPLICAS,
    "optimizer-clip-main-grad": Among.ALL,
    "optimizer": Among.NOBODY,
}
"""Which ranks wait for each other in the ops that Megatron-LM runs once per step."""

GAP = "before "
"""Before the name of an op: the time between what its rank did before, and the op."""

START = "start"
"""By how much later than the first a rank begins its step."""


@dataclass(frozen=True, slots=True)
class Joint:
    """An op of ranks before or after their pipeline's actions: a collective, or an optimizer's step."""

    name: str
    among: Among = Among.NOBODY


@dataclass(frozen=True, slots=True)
class OutsidePipeline:
    """The ops of each rank before and after its pipeline's actions, in order, and the seconds of all ops."""

    before: tuple[Joint, ...]
    after: tuple[Joint, ...]
    durations: Durations


def begin_times(among: Among, arrivals: Floats) -> Floats:
    """Return when each rank begins what it does with others, if they reach it then; NaN where a rank takes no part."""
    if among is Among.NOBODY:
        return arrivals
    axis = {Among.REPLICAS: 0, Among.PIPELINE: 1}.get(among)
    latest = np.where(np.isnan(arrivals), -np.inf, arrivals).max(axis=axis, keepdims=True)
    return np.where(np.isnan(arrivals), np.nan, latest)


def finish_times(joints: Sequence[Joint], durations: Durations, reached: Floats) -> Floats:
    """Return when each rank has finished all joints in order, if it reaches the first one at `reached`; by replica
    and rank."""
    for joint in joints:
        seconds = durations[joint.name]
        begins = begin_times(joint.among, np.where(np.isnan(seconds), np.nan, reached))
        reached = np.where(np.isnan(begins), reached, begins + seconds)
    return reached


# -- from a trace -----------------------------------------------------------------------------------------------------


def measure_outside(shape: tuple[int, int], events: Iterable[Event]) -> OutsidePipeline:
    """Return what ranks did around their pipelines in a step, with the time that each lost before it.

    Args:
        shape: how many replicas and ranks.
        events: of one step, each with its rank and replica, on one clock.

    Raises:
        ArgumentError: an op is unknown.
    """
    work, joint_ops = _group_by_op(events)
    compute_ops = [times for op, times in work.items() if op.is_compute]
    outside = _joint_ops(joint_ops, _extent(shape, compute_ops), gaps=True)
    if not outside.before:
        return outside
    start, _ = _table(shape, joint_ops[outside.before[0].name])
    offsets = {START: np.nan_to_num(start - np.nanmin(start))}
    return OutsidePipeline((Joint(START), *outside.before), outside.after, {**outside.durations, **offsets})


def measure_ops(schedule: Schedule, events: Iterable[Event]) -> OutsidePipeline:
    """Return the seconds of each op of a step, those of `PIPELINE` among them; time that ranks lose in between is left
    out.

    Args:
        schedule: what every replica ran; one stage a rank, backwards not split.
        events: as for `measure_outside`.

    Raises:
        ArgumentError: an op is unknown, or missing for a replica, rank or microbatch.
    """
    events = tuple(events)
    work, joint_ops = _group_by_op(events)
    replicas = 1 + max((event.replica or 0 for event in events), default=0)
    shape = (replicas, schedule.ranks, schedule.microbatches)
    outside = _joint_ops(joint_ops, _extent(shape[:2], work.values()))
    durations = {
        FORWARD: _compute_seconds(shape, work, Op.F),
        BACKWARD: _compute_seconds(shape, work, Op.B),
        FORWARD_MESSAGE: _message_seconds(shape, work, Op.SEND_F, Op.RECV_F, 1),
        BACKWARD_MESSAGE: _message_seconds(shape, work, Op.SEND_B, Op.RECV_B, -1),
    }
    return OutsidePipeline(outside.before, outside.after, {**durations, **outside.durations})


_Times = dict[tuple[int, int, int | None], tuple[float, float]]
"""Start and end of an op, by replica, rank and microbatch."""


def _group_by_op(events: Iterable[Event]) -> tuple[dict[Op, _Times], dict[str, _Times]]:
    """Return what a pipeline did, and by its name what a rank does once per step."""
    work: defaultdict[Op, _Times] = defaultdict(dict)
    joint_ops: defaultdict[str, _Times] = defaultdict(dict)
    for event in events:
        times = joint_ops[event.name] if event.action is None else work[event.action.op]
        microbatch = None if event.action is None else event.action.microbatch
        times[event.replica or 0, event.rank or 0, microbatch] = event.start_seconds, event.end_seconds
    return work, joint_ops


def _extent(shape: tuple[int, int], ops: Iterable[_Times]) -> tuple[Floats, Floats]:
    """Return the first start and the last end of some ops, by replica and rank."""
    first, last = np.full(shape, np.inf), np.full(shape, -np.inf)
    for times in ops:
        for (replica, rank, _), (start, end) in times.items():
            first[replica, rank] = min(first[replica, rank], start)
            last[replica, rank] = max(last[replica, rank], end)
    return first, last


def _compute_seconds(shape: tuple[int, int, int], ops: Mapping[Op, _Times], op: Op) -> Floats:
    """Return the seconds of each forward (or backward)."""
    times, name = ops.get(op, {}), FORWARD if op is Op.F else BACKWARD
    for _, rank, microbatch in times:
        if microbatch is None or rank >= shape[1] or microbatch >= shape[2]:
            raise ArgumentError(f"the trace's {name} of rank {rank}, microbatch {microbatch}, is not in the schedule")
    start, end = _table(shape, times)
    missing = np.argwhere(np.isnan(start))
    if len(missing):
        replica, rank, microbatch = missing[0].tolist()
        raise ArgumentError(
            f"the trace has no {name} of replica {replica}, rank {rank}, microbatch {microbatch}; expected one for each"
        )
    return np.asarray(end - start)


def _message_seconds(shape: tuple[int, int, int], ops: Mapping[Op, _Times], send: Op, receive: Op, step: int) -> Floats:
    """Return the seconds of each message, from when both ends were there until both were done; NaN where none was
    sent."""
    seconds, receives = np.full(shape, np.nan), ops.get(receive, {})
    for (replica, rank, microbatch), (start, end) in ops.get(send, {}).items():
        received = receives.get((replica, rank + step, microbatch))
        if received is not None and microbatch is not None:
            seconds[replica, rank, microbatch] = max(0.0, max(end, received[1]) - max(start, received[0]))
    return seconds


def _joint_ops(
    joint_ops: Mapping[str, _Times], pipeline: tuple[Floats, Floats], *, gaps: bool = False
) -> OutsidePipeline:
    """Return what ranks did before and after their pipelines' actions, whose first start and last end are passed in."""
    if unknown := joint_ops.keys() - KNOWN.keys():
        raise ArgumentError(f"the trace has an op {min(unknown)!r}, and which ranks do it together is unknown")
    first, last = pipeline
    times = {name: _table(first.shape, spans) for name, spans in joint_ops.items()}
    durations: dict[str, Floats] = {}
    parts: tuple[list[Joint], list[Joint]] = [], []
    latest: list[Floats | None] = [None, last]
    starts = np.array([start for start, _ in times.values()])
    before = {name: int((starts < start).sum(axis=0).max()) for name, (start, _) in times.items()}
    for name in sorted(times, key=before.__getitem__):  # as ordered on the ranks that do most of it
        start, end = times[name]
        is_after = int(np.nanmax(start - first) > 0)
        reached = latest[is_after]
        if gaps and reached is not None:
            waits = np.maximum(start - reached, 0.0)  # at most that of the last rank, which waits for no other
            last_rank = np.argmax(np.where(np.isnan(waits), -np.inf, reached))
            durations[GAP + name] = np.minimum(waits, waits.ravel()[last_rank])
            parts[is_after].append(Joint(GAP + name))
        durations[name] = np.maximum(end - begin_times(KNOWN[name], start), 0.0)
        parts[is_after].append(Joint(name, KNOWN[name]))
        latest[is_after] = end if reached is None else np.where(np.isnan(end), reached, end)
    if gaps and (ready := latest[0]) is not None:
        gap = first - ready  # later ranks wait for the first one's output, so the least counts
        durations[GAP + FORWARD] = np.where(np.isnan(gap), np.nan, max(float(np.nanmin(gap)), 0.0))
        parts[0].append(Joint(GAP + FORWARD))
    return OutsidePipeline(tuple(parts[0]), tuple(parts[1]), durations)


def _table(shape: tuple[int, ...], times: _Times) -> tuple[Floats, Floats]:
    """Starts and ends by replica, rank and, if the shape has them, microbatch; NaN where there is none."""
    starts, ends = np.full(shape, np.nan), np.full(shape, np.nan)
    for key, (start, end) in times.items():
        starts[key[: len(shape)]], ends[key[: len(shape)]] = start, end
    return starts, ends
