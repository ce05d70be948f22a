"""From the ops of a traced step to its durations: when each began and ended, of all ranks and replicas.

An op that several ranks do together lasts, on each, as long as it waits for the others. What it costs is the time from
when the last of them has begun: the rest is somebody else's slowness.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ArgumentError
from penstock.schedule import Schedule
from penstock.simulate.columns import Floats
from penstock.simulate.job import BACKWARD, BACKWARD_MESSAGE, FORWARD, FORWARD_MESSAGE, Among, Job, Joint, together


@dataclass(frozen=True, slots=True)
class Event:
    """One op of a traced step, on one clock.

    Attributes:
        op: what it is: one of `PIPELINE_OPS`, or the name of something that a rank does once a step.
        microbatch: None where it is not of a microbatch.
    """

    replica: int
    rank: int
    op: str
    microbatch: int | None
    start_seconds: float
    end_seconds: float


FORWARD_COMPUTE, BACKWARD_COMPUTE = "forward-compute", "backward-compute"
FORWARD_SEND, FORWARD_RECEIVE = "forward-send", "forward-recv"
BACKWARD_SEND, BACKWARD_RECEIVE = "backward-send", "backward-recv"
PIPELINE_OPS = (
    FORWARD_COMPUTE, BACKWARD_COMPUTE, FORWARD_SEND, FORWARD_RECEIVE, BACKWARD_SEND, BACKWARD_RECEIVE,
)  # fmt: skip

KNOWN: Mapping[str, Among] = {
    "params-all-gather": Among.REPLICAS,
    "layernorm-grads-all-reduce": Among.NOBODY,
    "embedding-grads-all-reduce": Among.PIPELINE,
    "grads-reduce-scatter": Among.REPLICAS,
    "optimizer-clip-main-grad": Among.ALL,
    "optimizer": Among.NOBODY,
}
"""Which ranks wait for each other in what Megatron-LM does once a step."""

GAP = "before "
"""Before the name of an op: the time between what its rank did before, and the op."""


@dataclass(frozen=True, slots=True)
class Traced:
    """A traced step: what it consists of, what each part took, and how long all of it lasted.

    Attributes:
        seconds: from the first start to the last end.
        spans: of each replica, from the first start of its forwards and backwards to their last end.
    """

    job: Job
    durations: Mapping[str, Floats]
    seconds: float
    spans: Floats


def traced(
    schedule: Schedule, events: Iterable[Event], among: Mapping[str, Among] = KNOWN, *, gaps: bool = False
) -> Traced:
    """The step that these events are.

    Args:
        schedule: what every replica ran; one stage a rank.
        events: of one step.
        among: who does an op together, by its name.
        gaps: whether the least time between such ops is a part of the step, too: a host's delay.

    Raises:
        ArgumentError: an op is unknown, or missing for a replica, rank or microbatch.
    """
    ops = _by_op(events)
    if unknown := ops.keys() - among.keys() - set(PIPELINE_OPS):
        raise ArgumentError(f"the trace has an op {min(unknown)!r}; say in `among` which ranks do it together")
    replicas = 1 + max((replica for of_op in ops.values() for replica, _, _ in of_op), default=0)
    shape = (replicas, schedule.ranks, schedule.numbers)
    first, last, begun, ended = _pipeline(shape[:2], ops)
    durations = {
        FORWARD: _computed(shape, ops, FORWARD_COMPUTE),
        BACKWARD: _computed(shape, ops, BACKWARD_COMPUTE),
        FORWARD_MESSAGE: _messages(shape, ops, FORWARD_SEND, FORWARD_RECEIVE, 1),
        BACKWARD_MESSAGE: _messages(shape, ops, BACKWARD_SEND, BACKWARD_RECEIVE, -1),
    }
    times = {op: _once(shape[:2], ops[op]) for op in ops if op not in PIPELINE_OPS}
    order = _in_order(times)
    before = [op for op in order if np.nanmax(times[op][0] - first) <= 0]
    after = [op for op in order if op not in before]
    opening, now = _joints(before, times, among, None, durations, gaps=gaps)
    if gaps and now is not None:
        durations[GAP + FORWARD] = _least(first - now)
        opening = (*opening, Joint(GAP + FORWARD))
    closing, _ = _joints(after, times, among, last, durations, gaps=gaps)
    every = [one for of_op in ops.values() for one in of_op.values()]
    seconds = max(end for _, end in every) - min(start for start, _ in every)
    return Traced(Job(schedule, opening, closing), durations, seconds, ended.max(axis=1) - begun.min(axis=1))


_Times = dict[tuple[int, int, int | None], tuple[float, float]]
"""When an op started and ended, by replica, rank and microbatch."""


def _by_op(events: Iterable[Event]) -> dict[str, _Times]:
    found: dict[str, _Times] = {}
    for one in events:
        times = found.setdefault(one.op, {})
        times[one.replica, one.rank, one.microbatch] = one.start_seconds, one.end_seconds
    return found


def _pipeline(shape: tuple[int, int], ops: Mapping[str, _Times]) -> tuple[Floats, Floats, Floats, Floats]:
    """By replica and rank: the first start and last end of what a pipeline does, and of its forwards and backwards."""
    found = []
    for names in (PIPELINE_OPS, (FORWARD_COMPUTE, BACKWARD_COMPUTE)):
        first, last = np.full(shape, np.inf), np.full(shape, -np.inf)
        for name in names:
            for (replica, rank, _), (start, end) in ops.get(name, {}).items():
                first[replica, rank] = min(first[replica, rank], start)
                last[replica, rank] = max(last[replica, rank], end)
        found += [first, last]
    first, last, begun, ended = found
    return first, last, begun, ended


def _computed(shape: tuple[int, int, int], ops: Mapping[str, _Times], name: str) -> Floats:
    """How long each forward (or backward) took."""
    took = np.full(shape, np.nan)
    for (replica, rank, number), (start, end) in ops.get(name, {}).items():
        if number is None or rank >= shape[1] or number >= shape[2]:
            raise ArgumentError(f"the trace's {name} of rank {rank}, microbatch {number}, is not in the schedule")
        took[replica, rank, number] = end - start
    missing = np.argwhere(np.isnan(took))
    if len(missing):
        replica, rank, number = missing[0].tolist()
        raise ArgumentError(
            f"the trace has no {name} of replica {replica}, rank {rank}, microbatch {number}; expected one for each"
        )
    return took


def _messages(shape: tuple[int, int, int], ops: Mapping[str, _Times], send: str, receive: str, step: int) -> Floats:
    """How long each message took, from when both ends were there until both were done; NaN where none was sent."""
    took, receives = np.full(shape, np.nan), ops.get(receive, {})
    for (replica, rank, number), (start, end) in ops.get(send, {}).items():
        other = receives.get((replica, rank + step, number))
        if other is not None and number is not None:
            took[replica, rank, number] = max(0.0, max(end, other[1]) - max(start, other[0]))
    return took


def _once(shape: tuple[int, int], times: _Times) -> tuple[Floats, Floats]:
    """The starts and ends of something that a rank does once a step; NaN where it does not."""
    starts, ends = np.full(shape, np.nan), np.full(shape, np.nan)
    for (replica, rank, _), (start, end) in times.items():
        starts[replica, rank], ends[replica, rank] = start, end
    return starts, ends


def _in_order(times: Mapping[str, tuple[Floats, Floats]]) -> list[str]:
    """What a rank does once a step, as ordered on the ranks that do most of it."""
    starts = np.array([start for start, _ in times.values()])
    before = {name: int((starts < start).sum(axis=0).max()) for name, (start, _) in times.items()}
    return sorted(times, key=before.__getitem__)


def _least(gaps: Floats) -> Floats:
    """The least gap, wherever there is one: longer ones may be waits for what a trace does not show."""
    return np.where(np.isnan(gaps), np.nan, max(float(np.nanmin(gaps)), 0.0))


def _joints(
    names: Sequence[str], times: Mapping[str, tuple[Floats, Floats]], among: Mapping[str, Among], now: Floats | None,
    durations: dict[str, Floats], *, gaps: bool,
) -> tuple[tuple[Joint, ...], Floats | None]:  # fmt: skip
    """What ranks did one after the other, with durations added to `durations`; and when each had done all.

    `now` is when each rank had done what came before; None at the start of a step.
    """
    joints = []
    for name in names:
        start, end = times[name]
        if gaps and now is not None:
            durations[GAP + name] = _least(start - now)
            joints.append(Joint(GAP + name))
        durations[name] = np.maximum(end - together(among[name], start), 0.0)
        joints.append(Joint(name, among[name]))
        now = end if now is None else np.where(np.isnan(end), now, end)
    return tuple(joints), now
