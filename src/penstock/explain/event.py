"""What every trace is read into: one event for each thing that a process did."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.schedule import Action


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a process did, on its own clock.

    Attributes:
        source: which process: whatever the trace calls it.
        name: the action's text, or the trace's name of something else, such as a collective or the optimizer.
        start_seconds, end_seconds: on the clock of its process.
        action: if it is one of the pipeline's: a computation, or a message's send or receive, which lasts as long as
            it waits.
        step: if the trace says; otherwise the first time that a process runs an action is step 0, the next is step 1.
        rank, replica: if the trace says; otherwise processes with the same stages are replicas of a rank.
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
class Recording:
    """All that was read.

    Attributes:
        events: of each process in order, as far as they do not say their step.
        with_waits: the span of an action begins when its process begins to wait for the input, as torch's ranges do.
        notes: what the reader left out, and why.
        stages: at least so many there are, as the trace says or its messages show; 0 if neither.
        unread: how often which names occur that name no action.
        crowded: whether ranks had fewer cores than they need; None: nor does the trace say whether they took turns.
    """

    events: tuple[Event, ...]
    with_waits: bool = False
    notes: tuple[str, ...] = ()
    stages: int = 0
    unread: Mapping[str, int] = field(default_factory=dict)
    crowded: bool | None = None
