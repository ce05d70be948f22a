"""Changes to a network over time: read from a TOML file, and played on hosts at their steps and times.

[[event]]            # docs/guides/fabric.md has an event of each kind
at = "step 50"       # a training step, or a trial; or a time since the start: "12.5s"
host = 2             # the host whose link it is; without it, all hosts without a link of their own
link = "10mbit delay 50ms loss 1%"
for = "30s"          # after that, everything is as before; without it, the change is permanent
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock._base.errors import ArgumentError
from penstock._base.files import read_toml
from penstock._base.formatting import printable_line
from penstock.network import quantities as q
from penstock.network.background import parse_background
from penstock.network.link import Link
from penstock.network.parse import parse_link
from penstock.network.topology import State, Topology

if TYPE_CHECKING:
    from penstock.network.machines import Machines

POLL_SECONDS = 0.01
_MAX_MESSAGE = 300
KEYS = ("at", "host", "link", "gone", "background", "for")


@dataclass(frozen=True, slots=True)
class Event:
    """One change.

    Attributes:
        step: the step, counted from 0, at which it happens; None: see `at_seconds`.
        at_seconds: when it happens, since the start.
        host: the host that changes; None for all.
        link: the link from then on.
        is_gone: the host is cut off.
        background: neighbors' traffic, as texts, in addition to what there already is.
        for_seconds: how long it lasts; None for ever.
        text: for display.
    """

    step: int | None = None
    at_seconds: float = 0.0
    host: int | None = None
    link: Link | None = None
    is_gone: bool = False
    background: tuple[str, ...] = ()
    for_seconds: float | None = None
    text: str = ""

    def apply(self, before: State) -> State:
        """Return a network's state while this event is active."""
        topology, gone = before.topology, set(before.gone)
        if self.link is not None and self.host is None:
            topology = Topology(self.link, {}, topology.seed).with_mtu(topology.mtu).with_links(topology.host_links)
        elif self.link is not None and self.host is not None:
            topology = topology.with_links({**topology.host_links, self.host: self.link})
        if self.is_gone and self.host is not None:
            gone.add(self.host)
        return State(topology, tuple(sorted(gone)), (*before.background, *self.background))


def read_scenario(path: Path, topology: Topology, hosts: int) -> tuple[Event, ...]:
    """Read the events of a file, for this network. Raise ArgumentError: the file cannot be read, or names something
    that does not exist; the message says which event."""
    name = f"--scenario {path}"
    table = read_toml(path, name)
    events, parsed = table.pop("event", None), []
    if table:
        raise ArgumentError(
            f"{name}: {printable_line(', '.join(table), _MAX_MESSAGE)} is unknown: use only [[event]] tables"
        )
    if not isinstance(events, list) or not events:
        raise ArgumentError(f'{name} has no events: use [[event]] tables, with at = "step 50", for example')
    for number, event in enumerate(events, 1):
        try:
            parsed.append(_event(event, topology, hosts))
        except (ArgumentError, ValueError) as error:
            line = printable_line(str(error).partition("\n")[0], _MAX_MESSAGE)
            raise ArgumentError(f"{name}, event {number}: {line}") from None
    return tuple(parsed)


def _event(table: Mapping[str, Any], topology: Topology, hosts: int) -> Event:
    unknown = [key for key in table if key not in KEYS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown: use {', '.join(KEYS)}")
    kinds = [key for key in ("link", "gone", "background") if table.get(key)]
    if len(kinds) != 1:
        raise ValueError("use exactly one of link, gone = true, or background")
    host, is_gone = table.get("host"), kinds == ["gone"]
    if host is not None:
        q.check_host(host, hosts)
    duration = q.seconds(_text(table, "for")) if "for" in table else None
    if duration is not None and duration <= 0:
        raise ValueError(f"for is {table['for']!r}: use a time above 0")
    if is_gone and (host is None or duration is None):
        raise ValueError(
            'gone needs a host and a time, like host = 1 and for = "5s": without an end, a job that waits for the host '
            "would never reach a later step"
        )
    background, step, at_seconds = table.get("background") or [], None, 0.0
    if background and host is not None:
        raise ValueError('put the target in the traffic itself, without host: background = ["50mbit to 1"]')
    if not isinstance(background, list) or not all(isinstance(text, str) for text in background):
        raise ValueError('background must be a list of strings: use one like ["50mbit to 1"]')
    for text in background:
        parse_background(text, hosts)
    match _text(table, "at").split():
        case ["step", number]:
            step = q.count(number)
        case [moment]:
            at_seconds = q.seconds(moment)
        case _:
            raise ValueError(f'at = {table["at"]!r} is not a time: use one like "step 50" or "12.5s"')
    link = parse_link(_text(table, "link")) if kinds == ["link"] else None
    if link is not None and link.mtu_is_given and link.mtu != topology.mtu:
        raise ValueError(f"the mtu cannot change from {topology.mtu}: omit it")
    text = ", ".join(f"{key} = {value}" for key, value in table.items() if key != "at")
    return Event(step, at_seconds, host, link, is_gone, tuple(background), duration, text)


def _text(table: Mapping[str, Any], key: str) -> str:
    value = table.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}: use a string")
    return value


class Playback:
    """Tracks which events are active as time and steps advance."""

    def __init__(self, events: Sequence[Event], initial: State) -> None:
        self._initial = initial
        self._pending = list(events)
        self._active: list[tuple[Event, float]] = []
        self.state = initial

    def advance(self, seconds: float, step: int) -> list[str]:
        """Advance to this moment, which is not before the last one: update `state`, and return what has changed in
        words. Steps count from 0; -1 before the first has begun."""
        changes = [f"over: {event.text}" for event, end in self._active if end <= seconds]
        self._active = [(event, end) for event, end in self._active if end > seconds]
        due = [e for e in self._pending if (seconds >= e.at_seconds if e.step is None else step >= e.step)]
        for event in due:
            self._pending.remove(event)
            end = float("inf") if event.for_seconds is None else seconds + event.for_seconds
            self._active.append((event, end))
            changes.append(event.text)
        if changes:
            self.state = self._initial
            for event, _ in self._active:
                self.state = event.apply(self.state)
        return changes


@dataclass(frozen=True, slots=True)
class AppliedEvent:
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
        moment = f"{self.seconds:.1f} s" if self.step < 0 else f"{self.seconds:.1f} s, step {self.step}"
        return f"{moment}: {self.text}"


@contextmanager
def play(machines: Machines | None, events: Sequence[Event], step: Callable[[], int]) -> Iterator[list[AppliedEvent]]:
    """Play the scenario while the block runs, starting the clock with the block; restore the network at the end.

    Yields the changes made so far, and raises at the end of the block whatever a change raised.

    Args:
        machines: created with `changes`; None: there are no events.
        step: returns the last step to have begun, from 0; -1 before the first.
    """
    applied: list[AppliedEvent] = []
    if machines is None or not events:
        yield applied
        return
    assert machines.topology is not None
    initial, finished = State(machines.topology, background=machines.background), threading.Event()

    def apply() -> None:
        playback, began = Playback(events, initial), time.monotonic()
        while not finished.wait(POLL_SECONDS):
            seconds, current = time.monotonic() - began, step()
            if texts := playback.advance(seconds, current):
                machines.change(playback.state)
                applied.extend(AppliedEvent(seconds, current, text) for text in texts)
        machines.change(initial)

    with ThreadPoolExecutor(1, "penstock-scenario") as thread:
        future = thread.submit(apply)
        try:
            yield applied
        finally:
            finished.set()
        future.result()
