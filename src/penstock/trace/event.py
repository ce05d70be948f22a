"""The form that every trace is read into: one event for each op of a process, and the numbers that a trace omits."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf

from penstock.schedule import Action, Op
from penstock.trace.runs.about import RunInfo


@dataclass(frozen=True, slots=True)
class Event:
    """One op of a process, on its own clock.

    Attributes:
        source: which process: whatever the trace calls it.
        name: the action's text, or the trace's name of something else, such as a collective or the optimizer.
        start_seconds, end_seconds: on the clock of its process.
        action: if it is one of the pipeline's: a computation, or a message's send or receive, which lasts as long as
            it waits.
        step: if the trace has it; otherwise the first time that a process runs an action is step 0, the next is step 1.
        rank, replica: if the trace has them; otherwise processes with the same stages are replicas of a rank.
        chunk: which of its rank's stages it is, as long as the action's stage is the rank; None: the stage is known.
        counted: its microbatch is not known: the next one of this op.
    """

    source: tuple[int | str, ...]
    name: str
    start_seconds: float
    end_seconds: float
    action: Action | None = None
    step: int | None = None
    rank: int | None = None
    replica: int | None = None
    chunk: int | None = None
    counted: bool = False

    @property
    def computes(self) -> bool:
        return self.action is not None and self.action.op.is_compute


@dataclass(frozen=True, slots=True)
class TraceData:
    """All that was read.

    Attributes:
        events: of each process in order, as far as they do not say their step.
        with_waits: the span of an action begins when its process begins to wait for the input, as torch's ranges do.
        notes: what the reader left out, and why.
        stages: a lower bound on their number, from the trace or its messages; 0 if unknown.
        unread: how often which names occur that name no action.
        crowded: whether ranks had fewer cores than they need; None: nor does the trace say whether they took turns.
        world: how many ranks the job had; 0: the trace does not say.
        about: what the folder of a run says of it.
    """

    events: tuple[Event, ...]
    with_waits: bool = False
    notes: tuple[str, ...] = ()
    stages: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)
    crowded: bool | None = None
    world: int = 0
    about: RunInfo | None = None


def number_events(events: Sequence[Event]) -> tuple[Event, ...]:
    """Return the events, each process's in order, with the stage, microbatch and step of every action: a trace may
    leave out the stage of a rank's chunk, and the microbatch and step of ops that are only named."""
    last = max((event.chunk or 0 for event in events), default=0)
    result = _assign_stages(events, last) if last else [*events]
    ends, counts = _step_ends(result), Counter[object]()
    for index, event in enumerate(result):
        if event.counted and event.action is not None:
            key = event.source, event.action.stage, event.action.op, event.step
            number, step = counts[key], event.step
            counts[key] += 1
            if step is None and ends:
                step = bisect.bisect_right(ends, number)
                number -= ends[step - 1] if step else 0
            action = replace(event.action, microbatch=number)
            result[index] = replace(event, name=str(action), action=action, step=step)
    return tuple(result)


def _assign_stages(events: Sequence[Event], last_chunk: int) -> list[Event]:
    """Convert chunks to stages: ranks have them in a loop, or in a V.

    The last stage is on the rank that has a microbatch's backward soonest after its forward, by its own clock.
    """
    chunked = [(event.action, event.chunk, event) for event in events if event.action and event.chunk is not None]
    ranks = 1 + max(action.stage for action, _, _ in chunked)
    first_events: dict[tuple[int, bool], Event] = {}
    for action, chunk, event in chunked:
        if chunk == last_chunk and action.op is not Op.W and not action.microbatch:
            first_events.setdefault((action.stage, action.op is Op.F), event)
    turnarounds = {
        rank: first_events[rank, False].start_seconds - event.end_seconds
        for (rank, is_forward), event in first_events.items()
        if is_forward and (rank, False) in first_events
    }
    is_v = turnarounds.get(0, inf) < turnarounds.get(ranks - 1, inf)
    result = []
    for event in events:
        if event.action is not None and event.chunk:
            rank = event.action.stage
            stage = event.chunk * ranks + (ranks - 1 - rank if is_v and event.chunk % 2 else rank)
            action = replace(event.action, stage=stage)
            event = replace(event, name=str(action), action=action)
        result.append(event)
    return result


def _step_ends(events: Sequence[Event]) -> list[int]:
    """Return how many microbatches had begun each time that all stages had run as many backwards as forwards."""
    in_flight, started, balanced = Counter[object](), Counter[object](), defaultdict[object, set[int]](set)
    for event in events:
        if event.counted and event.action is not None and event.action.op is not Op.W:
            stage = event.source, event.action.stage
            in_flight[stage] += 1 if event.action.op is Op.F else -1
            started[stage] += event.action.op is Op.F
            if not in_flight[stage]:
                balanced[stage].add(started[stage])
    return sorted(set.intersection(*balanced.values())) if len(in_flight) == len(balanced) > 1 else []
