"""What every trace is read into: one event for each thing that a process did."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

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
    """

    source: tuple[int | str, ...]
    name: str
    start_seconds: float
    end_seconds: float
    action: Action | None = None
    step: int | None = None
    rank: int | None = None
    replica: int | None = None

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
        stages: at least so many there are, by the messages in the trace; 0 if it has none.
    """

    events: tuple[Event, ...]
    with_waits: bool = False
    notes: tuple[str, ...] = ()
    stages: int = 0


_BACKWARD = re.compile(r"([0-9]{1,9})[BI][0-9]+")
_WAITS = 0.05
"""A stage whose backwards wait for such a share of what they take waits for another stage."""


def stages_by_waits(waits: Iterable[tuple[str, float]], ran: Iterable[tuple[str, float]]) -> int:
    """How many stages there are at least, since only the last one's backwards wait for nobody.

    Args:
        waits: the text of the action that was waited for, and how long.
        ran: the text of each action, and how long it took.
    """
    waited: defaultdict[int, float] = defaultdict(float)
    took: defaultdict[int, float] = defaultdict(float)
    for totals, given in ((waited, waits), (took, ran)):
        for text, seconds in given:
            if named := _BACKWARD.fullmatch(text):
                totals[int(named[1])] += seconds
    return max((stage + 2 for stage, seconds in waited.items() if seconds > _WAITS * took[stage]), default=0)
