"""Play a scenario on a network: watch the clock and the step, and make the changes that are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from penstock.network.machines import Machines
from penstock.network.scenario import Event, Play, State

LOOK_SECONDS = 0.01


@dataclass(frozen=True, slots=True)
class Happened:
    """A change that was made.

    Attributes:
        seconds: since the start.
        step: the last step to have begun; -1 before the first.
        text: what changed.
    """

    seconds: float
    step: int
    text: str

    def __str__(self) -> str:
        when = f"{self.seconds:.1f} s" if self.step < 0 else f"{self.seconds:.1f} s, step {self.step}"
        return f"{when}: {self.text}"


@contextmanager
def playing(machines: Machines | None, events: Sequence[Event], step: Callable[[], int]) -> Iterator[list[Happened]]:
    """Plays the scenario while the block runs, starting the clock with the block; restores the network at the end.

    Yields the changes made so far.

    Args:
        machines: created with `changes`; None: there are no events.
        events: the scenario's events.
        step: a function that returns the last step to have begun, from 0; -1 before the first.

    Raises:
        Exception: whatever a change raised, at the end of the block.
    """
    happened: list[Happened] = []
    if machines is None or not events:
        yield happened
        return
    assert machines.topology is not None
    play = Play(events, State(machines.topology, background=machines.background))
    over = threading.Event()
    with ThreadPoolExecutor(1, "penstock-scenario") as thread:
        played = thread.submit(_play, machines, play, step, happened, over)
        try:
            yield happened
        finally:
            over.set()
        played.result()


def _play(
    machines: Machines, play: Play, step: Callable[[], int], happened: list[Happened], over: threading.Event
) -> None:
    first, began = play.state, time.monotonic()
    while not over.wait(LOOK_SECONDS):
        seconds, now = time.monotonic() - began, step()
        before = play.state
        said = play.at(seconds, now)
        _turn(machines, before, play.state)
        happened += [Happened(seconds, now, text) for text in said]
    _turn(machines, play.state, first)


def _turn(machines: Machines, before: State, after: State) -> None:
    """Applies the differences between two states."""
    changes: dict[str, Callable[[Any], None]] = {
        "topology": machines.change,
        "gone": machines.lose,
        "background": machines.surround,
    }
    for name, change in changes.items():
        if getattr(after, name) != getattr(before, name):
            change(getattr(after, name))
