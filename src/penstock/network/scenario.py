"""Changes to a network over time, from a TOML file:

[[event]]                       # a link that degrades for half a minute
at = "step 50"                  # a training step, or a trial; or a time since the start: "12.5s"
host = 2                        # the host whose link it is; without it, all hosts without a link of their own
link = "10mbit delay 50ms loss 1%"
for = "30s"                     # after that, everything is as before; without it, the change is permanent

[[event]]                       # a host that disappears and comes back
at = "step 80"
host = 1
gone = true
for = "5s"

[[event]]                       # a neighbor that starts to send
at = "20s"
background = ["300mbit to 1"]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock._base.files import read_toml
from penstock._base.words import line_of
from penstock.errors import ArgumentError
from penstock.network import quantities as q
from penstock.network.background import parse_background
from penstock.network.link import Link
from penstock.network.parse import parse_link
from penstock.network.topology import Topology

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
        is_gone: True if the host is cut off.
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


@dataclass(frozen=True, slots=True)
class State:
    """A network at one moment."""

    topology: Topology
    gone: tuple[int, ...] = ()
    background: tuple[str, ...] = ()


def read_scenario(path: Path, topology: Topology, hosts: int) -> tuple[Event, ...]:
    """Reads the events of a file, for this network. Raises ArgumentError: the file cannot be read, or names something
    that does not exist; the message says which event."""
    given = read_toml(path, f"--scenario {path}")
    events = given.pop("event", None)
    if given:
        raise ArgumentError(
            f"--scenario {path}: {line_of(', '.join(given), _MAX_MESSAGE)} is unknown: use only [[event]] tables"
        )
    if not isinstance(events, list) or not events:
        raise ArgumentError(f'--scenario {path} has no events: use [[event]] tables, with at = "step 50", for example')
    found = []
    for number, event in enumerate(events, 1):
        try:
            found.append(_event(event, topology, hosts))
        except (ArgumentError, ValueError) as error:
            line = line_of(str(error).partition("\n")[0], _MAX_MESSAGE)
            raise ArgumentError(f"--scenario {path}, event {number}: {line}") from None
    return tuple(found)


def _event(given: Mapping[str, Any], topology: Topology, hosts: int) -> Event:
    unknown = [key for key in given if key not in KEYS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is unknown: use {', '.join(KEYS)}")
    what = [key for key in ("link", "gone", "background") if given.get(key)]
    if len(what) != 1:
        raise ValueError("use exactly one of link, gone = true, or background")
    host = given.get("host")
    if host is not None and (type(host) is not int or not 0 <= host < hosts):
        raise ValueError(f"host {host!r} does not exist: the hosts are 0 to {hosts - 1}")
    lasts = q.seconds(_text(given, "for")) if "for" in given else None
    if lasts is not None and lasts <= 0:
        raise ValueError(f"for is {given['for']!r}: use a time above 0")
    if what == ["gone"] and (host is None or lasts is None):
        raise ValueError(
            'gone needs a host and a time, like host = 1 and for = "5s": without an end, a job that waits for the host '
            "would never reach a later step"
        )
    if what == ["background"] and host is not None:
        raise ValueError('put the target in the traffic itself, without host: background = ["50mbit to 1"]')
    step, at_seconds = _moment(_text(given, "at"))
    text = ", ".join(f"{key} = {value}" for key, value in given.items() if key != "at")
    return Event(
        step,
        at_seconds,
        host,
        _link(_text(given, "link"), topology) if what == ["link"] else None,
        what == ["gone"],
        _background(given["background"], hosts) if what == ["background"] else (),
        lasts,
        text,
    )


def _text(given: Mapping[str, Any], key: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise ValueError(f"{key} is {value!r}: use a string")
    return value


def _moment(text: str) -> tuple[int | None, float]:
    words = text.split()
    if len(words) == 2 and words[0] == "step":
        return q.count(words[1]), 0.0
    if len(words) == 1:
        return None, q.seconds(words[0])
    raise ValueError(f'at = {text!r} is not a time: use one like "step 50" or "12.5s"')


def _link(text: str, topology: Topology) -> Link:
    link = parse_link(text)
    if link.mtu_is_given and link.mtu != topology.mtu:
        raise ValueError(f"the mtu cannot change from {topology.mtu}: leave it out")
    return link


def _background(given: Any, hosts: int) -> tuple[str, ...]:
    if not isinstance(given, list) or not all(isinstance(text, str) for text in given):
        raise ValueError('background must be a list of strings: use one like ["50mbit to 1"]')
    for text in given:
        parse_background(text, hosts)
    return tuple(given)


def state_of(events: Sequence[Event], before: State) -> State:
    """Returns a network's state while these events are active, applied in this order."""
    topology, gone, background = before.topology, set(before.gone), list(before.background)
    for event in events:
        if event.link is not None and event.host is None:
            topology = Topology(event.link, {}, topology.seed).with_mtu(topology.mtu).with_own(topology.own)
        elif event.link is not None and event.host is not None:
            own = {**topology.own, event.host: event.link}
            topology = topology.with_own(own)
        if event.is_gone and event.host is not None:
            gone.add(event.host)
        background += event.background
    return State(topology, tuple(sorted(gone)), tuple(background))


class Play:
    """Tracks which events are active as time and steps advance."""

    def __init__(self, events: Sequence[Event], before: State) -> None:
        self._before = before
        self._waiting = list(events)
        self._holding: list[tuple[Event, float]] = []
        self.state = before

    def at(self, seconds: float, step: int) -> list[str]:
        """Advances to this moment, which is not before the last one: updates `state`, and returns what has changed in
        words. Steps count from 0; -1 before the first has begun."""
        said: list[str] = []
        over = [event for event, end in self._holding if end <= seconds]
        self._holding = [(event, end) for event, end in self._holding if end > seconds]
        said += [f"over: {event.text}" for event in over]
        due = [e for e in self._waiting if (seconds >= e.at_seconds if e.step is None else step >= e.step)]
        for event in due:
            self._waiting.remove(event)
            end = float("inf") if event.for_seconds is None else seconds + event.for_seconds
            self._holding.append((event, end))
            said.append(event.text)
        if said:
            self.state = state_of([event for event, _ in self._holding], self._before)
        return said
