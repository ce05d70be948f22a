"""Play a scenario on a network: watch the clock and the step, and make the changes that are due."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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


@dataclass(slots=True)
class Played:
    """The changes made so far, and an error if one occurred."""

    happened: list[Happened] = field(default_factory=list)
    error: Exception | None = None


@contextmanager
def playing(machines: Machines, events: Sequence[Event], step: Callable[[], int]) -> Iterator[Played]:
    """Plays the scenario while the block runs, starting the clock with the block; restores the network at the end.

    Args:
        machines: created with `changes`.
        events: the scenario's events.
        step: a function that returns the last step to have begun, from 0; -1 before the first.

    Raises:
        Exception: whatever a change raised, at the end of the block.
    """
    played = Played()
    over = threading.Event()
    thread = threading.Thread(target=_play, args=(machines, events, step, played, over), name="penstock-scenario")
    if events:
        thread.start()
    try:
        yield played
    finally:
        over.set()
        if events:
            thread.join()
    if played.error is not None:
        raise played.error


def _play(
    machines: Machines, events: Sequence[Event], step: Callable[[], int], played: Played, over: threading.Event
) -> None:
    assert machines.topology is not None
    first = State(machines.topology, background=machines.background)
    play = Play(events, first)
    began = time.monotonic()
    try:
        while not over.wait(LOOK_SECONDS):
            seconds, now = time.monotonic() - began, step()
            before = play.state
            said = play.at(seconds, now)
            _turn(machines, before, play.state)
            played.happened += [Happened(seconds, now, text) for text in said]
        _turn(machines, play.state, first)
    except Exception as error:
        played.error = error


def _turn(machines: Machines, before: State, after: State) -> None:
    """Applies the differences between two states."""
    if after.topology != before.topology:
        machines.change(after.topology)
    if after.gone != before.gone:
        machines.lose(after.gone)
    if after.background != before.background:
        machines.surround(after.background)
