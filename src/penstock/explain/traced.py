"""From the ops of a traced step to its durations: when each began and ended, of all ranks and replicas.

An op that several ranks do together lasts, on each, as long as it waits for the others. What it costs is the time from
when the last of them has begun: the rest is somebody else's slowness.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ArgumentError
from penstock.explain.event import Event
from penstock.schedule import Op, Schedule
from penstock.simulate.columns import Floats
from penstock.simulate.job import BACKWARD, BACKWARD_MESSAGE, FORWARD, FORWARD_MESSAGE, Among, Job, Joint, together

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


START = "start"
"""By how much later than the first a rank begins its step."""


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


@dataclass(frozen=True, slots=True)
class Around:
    """What each rank does before and after its pipeline's actions, in order, and how long that takes, [R, P]."""

    before: tuple[Joint, ...]
    after: tuple[Joint, ...]
    durations: Mapping[str, Floats]


def around(shape: tuple[int, int], events: Iterable[Event], among: Mapping[str, Among] = KNOWN) -> Around:
    """What ranks did around their pipelines in a step, with the time that each lost before it.

    Args:
        shape: how many replicas and ranks.
        events, among: as for `traced`.

    Raises:
        ArgumentError: an op is unknown.
    """
    work, joint = _by_op(events)
    extent = _extent(shape, [times for op, times in work.items() if op.is_compute])
    before, after, durations = _around(joint, extent, among, _own)
    if before:
        start, _ = _once(shape, joint[before[0].name])
        durations[START] = np.nan_to_num(start - np.nanmin(start))
        before = (Joint(START), *before)
    return Around(before, after, durations)


def traced(
    schedule: Schedule, events: Iterable[Event], among: Mapping[str, Among] = KNOWN, *, gaps: bool = False
) -> Traced:
    """The step that these events are.

    Args:
        schedule: what every replica ran; one stage a rank, backwards not split.
        events: of one step, each with its rank and replica, on one clock.
        among: who does an op together, by its name.
        gaps: whether the least time between such ops is a part of the step, too: a host's delay.

    Raises:
        ArgumentError: an op is unknown, or missing for a replica, rank or microbatch.
    """
    events = tuple(events)
    work, joint = _by_op(events)
    replicas = 1 + max((event.replica or 0 for event in events), default=0)
    shape = (replicas, schedule.ranks, schedule.numbers)
    first, last = _extent(shape[:2], work.values())
    begun, ended = _extent(shape[:2], [work.get(Op.F, {}), work.get(Op.B, {})])
    durations = {
        FORWARD: _computed(shape, work, Op.F),
        BACKWARD: _computed(shape, work, Op.B),
        FORWARD_MESSAGE: _messages(shape, work, Op.SEND_F, Op.RECV_F, 1),
        BACKWARD_MESSAGE: _messages(shape, work, Op.SEND_B, Op.RECV_B, -1),
    }
    opening, closing, more = _around(joint, (first, last), among, _least if gaps else None)
    seconds = max(event.end_seconds for event in events) - min(event.start_seconds for event in events)
    spans = ended.max(axis=1) - begun.min(axis=1)
    return Traced(Job(schedule, opening, closing), durations | more, seconds, spans)


_Gap = Callable[[Floats, Floats], Floats]
"""What counts as a part of the step, of the gaps between when ranks had done what came before, and an op's starts."""

_Times = dict[tuple[int, int, int | None], tuple[float, float]]
"""When an op started and ended, by replica, rank and microbatch."""


def _by_op(events: Iterable[Event]) -> tuple[dict[Op, _Times], dict[str, _Times]]:
    """What a pipeline did, and by its name what a rank does once a step."""
    work: defaultdict[Op, _Times] = defaultdict(dict)
    joint: defaultdict[str, _Times] = defaultdict(dict)
    for event in events:
        times = joint[event.name] if event.action is None else work[event.action.op]
        number = None if event.action is None else event.action.microbatch
        times[event.replica or 0, event.rank or 0, number] = event.start_seconds, event.end_seconds
    return work, joint


def _extent(shape: tuple[int, int], ops: Iterable[_Times]) -> tuple[Floats, Floats]:
    """The first start and the last end of some ops, by replica and rank."""
    first, last = np.full(shape, np.inf), np.full(shape, -np.inf)
    for times in ops:
        for (replica, rank, _), (start, end) in times.items():
            first[replica, rank] = min(first[replica, rank], start)
            last[replica, rank] = max(last[replica, rank], end)
    return first, last


def _computed(shape: tuple[int, int, int], ops: Mapping[Op, _Times], op: Op) -> Floats:
    """How long each forward (or backward) took."""
    took, name = np.full(shape, np.nan), FORWARD if op is Op.F else BACKWARD
    for (replica, rank, number), (start, end) in ops.get(op, {}).items():
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


def _messages(shape: tuple[int, int, int], ops: Mapping[Op, _Times], send: Op, receive: Op, step: int) -> Floats:
    """How long each message took, from when both ends were there until both were done; NaN where none was sent."""
    took, receives = np.full(shape, np.nan), ops.get(receive, {})
    for (replica, rank, number), (start, end) in ops.get(send, {}).items():
        other = receives.get((replica, rank + step, number))
        if other is not None and number is not None:
            took[replica, rank, number] = max(0.0, max(end, other[1]) - max(start, other[0]))
    return took


def _around(
    joint: Mapping[str, _Times], pipeline: tuple[Floats, Floats], among: Mapping[str, Among], gap: _Gap | None
) -> tuple[tuple[Joint, ...], tuple[Joint, ...], dict[str, Floats]]:
    """What ranks did before and after their pipelines' actions, whose first start and last end are given."""
    if unknown := joint.keys() - among.keys():
        raise ArgumentError(f"the trace has an op {min(unknown)!r}; say in `among` which ranks do it together")
    first, last = pipeline
    times = {name: _once(first.shape, found) for name, found in joint.items()}
    order = _in_order(times)
    before = [name for name in order if np.nanmax(times[name][0] - first) <= 0]
    after = [name for name in order if name not in before]
    durations: dict[str, Floats] = {}
    opening, now = _joints(before, times, among, None, durations, gap)
    if gap is not None and now is not None:
        durations[GAP + FORWARD] = _least(first, now)  # later ranks wait for the first one's output
        opening = (*opening, Joint(GAP + FORWARD))
    closing, _ = _joints(after, times, among, last, durations, gap)
    return opening, closing, durations


def _once(shape: tuple[int, ...], times: _Times) -> tuple[Floats, Floats]:
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


def _least(start: Floats, now: Floats) -> Floats:
    """The least gap, wherever there is one: longer ones may be waits for what a trace does not show."""
    return np.where(np.isnan(start - now), np.nan, max(float(np.nanmin(start - now)), 0.0))


def _own(start: Floats, now: Floats) -> Floats:
    """Each rank's own gap, but no longer than that of the rank that comes last, as only that waits for nobody."""
    gaps: Floats = np.maximum(start - now, 0.0)
    last = gaps.ravel()[np.argmax(np.where(np.isnan(gaps), -np.inf, now))]
    return np.asarray(np.minimum(gaps, last))


def _joints(
    names: Sequence[str], times: Mapping[str, tuple[Floats, Floats]], among: Mapping[str, Among], now: Floats | None,
    durations: dict[str, Floats], gap: _Gap | None,
) -> tuple[tuple[Joint, ...], Floats | None]:  # fmt: skip
    """What ranks did one after the other, with durations added to `durations`; and when each had done all.

    `now` is when each rank had done what came before; None at the start of a step.
    """
    joints = []
    for name in names:
        start, end = times[name]
        if gap is not None and now is not None:
            durations[GAP + name] = gap(start, now)
            joints.append(Joint(GAP + name))
        durations[name] = np.maximum(end - together(among[name], start), 0.0)
        joints.append(Joint(name, among[name]))
        now = end if now is None else np.where(np.isnan(end), now, end)
    return tuple(joints), now
