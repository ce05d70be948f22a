"""Records when actions ran, on the clock that all processes of a machine share, without delaying anything; memory; and
how far a device has come, so that the watchdog can name the action it is at (`Progress`).

A GPU lags behind the process that gives it work, so marks are events that are queued with the work, and all are read at
once after the step. Waiting for the whole device at each mark would also wait for receives that are only posted, on
NCCL's own streams: two ranks that each posted one would wait for each other.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, Protocol

import torch

from penstock._base.compat import is_accelerator
from penstock.distributed.failure import OUTSIDE, DeviceLag, Position
from penstock.distributed.host_clock import now_ns
from penstock.distributed.watchdog import Watchdog
from penstock.runtime.transport.protocol import Begun, Observable, Pending, Transport
from penstock.schedule import Action

Moment = tuple[Action, int, int, int]
"""An action as it ran: when it began to wait, was ready, and ended, in nanoseconds of `time.perf_counter_ns`."""

Marks = tuple[Action, Any, Any, Any]
"""The same, as marks of a clock."""

_ANCHORS = 3

RING_SIZE = 1024
"""How many events `Progress` has. They are used again in turn: a host is never further ahead, since a device's queue
holds about as many entries, and an action adds several."""


class Clock(Protocol):
    """Marks times in one rank's work."""

    def start(self) -> None:
        """Called before the first mark of a step."""

    def mark(self) -> Any:
        """Mark the moment at which the work given so far is done, without waiting for it."""

    def read(self, row: Sequence[Marks]) -> list[Moment]:
        """Convert the marks of a step to times. Call this once, at its end; it waits until the work is done."""


class HostClock:
    """The clock of a rank that computes on the CPU: its work is done when the call returns."""

    def start(self) -> None:
        """Do nothing."""

    def mark(self) -> int:
        return now_ns()

    def read(self, row: Sequence[Marks]) -> list[Moment]:
        return list(row)


class StreamClock:
    """The clock of a rank that computes on a device with streams.

    Actions are marked by events on its current stream, which waits only for the messages that actions use, and messages
    by events on streams of our own, one for each direction between two ranks, which wait for nothing else. Events are
    made once and used again in every step that is timed.

    Args:
        module: the device's functions, such as `torch.cuda`.
    """

    def __init__(self, device: torch.device, module: Any = None) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device) if module is None else module
        self._events: list[Any] = []
        self._used = 0
        self._streams: dict[tuple[int, int], Any] = {}
        self._messages: dict[Action, tuple[Any, Any]] = {}

    def start(self) -> None:
        self._used = 0
        self._messages.clear()

    def mark(self, stream: Any = None) -> Any:
        if self._used == len(self._events):
            self._events.append(self._module.Event(enable_timing=True))
        event = self._events[self._used]
        self._used += 1
        event.record(self._module.current_stream(self._device) if stream is None else stream)
        return event

    def message(self, action: Action, ranks: tuple[int, int]) -> Begun:
        """Mark the time from which a message can travel. Once it has begun, call the result: it marks the arrival."""
        if ranks not in self._streams:
            self._streams[ranks] = self._module.Stream(self._device)
        stream = self._streams[ranks]
        stream.wait_stream(self._module.current_stream(self._device))
        began = self.mark(stream)

        def begun(works: Sequence[Pending]) -> None:
            with self._module.stream(stream):  # which waits for the message, in place of the one that computes
                for work in works:
                    work.wait()
            self._messages[action] = began, self.mark(stream)

        return begun

    def read(self, row: Sequence[Marks]) -> list[Moment]:
        current = self._module.current_stream(self._device)
        for stream in self._streams.values():
            current.wait_stream(stream)
        anchor, anchor_ns = self._anchor()

        def at(mark: Any) -> int:
            return anchor_ns - round(float(mark.elapsed_time(anchor)) * 1e6)

        moments = []
        for action, began, ready, ended in row:
            if action in self._messages:
                began, ended = self._messages[action]
                ready = began
            moments.append((action, at(began), at(ready), at(ended)))
        return moments

    def _anchor(self) -> tuple[Any, int]:
        """Return a mark after all others, and when it was on the host's clock.

        The first waits for the step's work. The host may lose its processor between a mark and its own clock, so this
        is the mark with the smallest uncertainty.
        """
        anchors = []
        for _ in range(_ANCHORS):
            before = now_ns()
            mark = self.mark()
            mark.synchronize()
            after = now_ns()
            anchors.append((after - before, (before + after) // 2, mark))
        _, anchor_ns, mark = min(anchors, key=itemgetter(0))
        return mark, anchor_ns


def has_events(device: torch.device) -> bool:
    """Whether work on this device is queued in streams, and recorded by events."""
    if not is_accelerator(device):
        return False
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("Event", "Stream", "current_stream", "stream", "device"))


def make_clock(device: torch.device) -> Clock:
    """Return the clock for a rank's work on this device."""
    return StreamClock(device) if has_events(device) else HostClock()


Counter = Callable[[], int]
"""Tells how many bytes are allocated on a device now.

The host makes and frees tensors in the order in which the device will use them, so the allocator's own count at the end
of an action is what that action leaves, however far the device is behind. Asking takes tens of microseconds."""


def counter(device: torch.device) -> Counter | None:
    """Return the memory counter of a device; None if there is none, as on the CPU."""
    if not is_accelerator(device):
        return None
    count: Callable[[torch.device], int] | None = getattr(torch.get_device_module(device), "memory_allocated", None)
    return None if count is None else lambda: int(count(device))


def shifted(row: list[Moment], nanoseconds: int) -> list[Moment]:
    """Return the same moments on another clock, which is ahead by this much."""
    if not nanoseconds:
        return row
    return [(action, *(at + nanoseconds for at in times)) for action, *times in row]  # type: ignore[misc]


@contextmanager
def noting_messages(transports: Mapping[int, Transport], clocks: Mapping[int, Clock]) -> Iterator[None]:
    """Wrap a timed step: clocks that can record when messages traveled get each.

    Where torch is told to block in every wait, that would wait for the message itself.

    Args:
        transports, clocks: by rank.
    """
    blocks = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") != "0"
    noted = [
        (transport, clock)
        for rank, transport in transports.items()
        if not blocks and isinstance(transport, Observable) and isinstance(clock := clocks[rank], StreamClock)
    ]
    for transport, clock in noted:
        transport.observer = clock.message
    try:
        yield
    finally:
        for transport, _ in noted:
            transport.observer = None


class Progress:
    """Passes a rank's positions on to its watchdog, and marks where each ended in the work of its device.

    The host runs ahead of an accelerator: by the time that one hangs in `1F2`, its host may wait for the loss, or for a
    place in the device's queue. So whenever the host passes on from one position to the next, it records an event on
    the stream that its work went to; the device has passed that position once the event is complete.

    The main thread sets `position`; the watchdog's thread calls `behind`.
    """

    def __init__(self, device: torch.device, watchdog: Watchdog) -> None:
        self._device, self._watchdog = device, watchdog
        self._module: Any = torch.get_device_module(device)
        self._events = [self._module.Event() for _ in range(RING_SIZE)]
        self._positions = [OUTSIDE] * RING_SIZE
        self._marked = self._passed = 0
        self._seen: DeviceLag | None = None
        watchdog.device = self.behind

    @property
    def position(self) -> Position:
        """Where the host is."""
        return self._watchdog.position

    @position.setter
    def position(self, position: Position) -> None:
        slot = self._marked % RING_SIZE
        self._positions[slot] = self._watchdog.position
        self._events[slot].record(self._module.current_stream(self._device))
        self._marked += 1
        self._watchdog.position = position

    def behind(self) -> DeviceLag | None:
        """Return where the device is, if it has not passed the last mark. Never wait for it.

        If the device has failed, so that all calls raise, return the previous answer.
        """
        marked = self._marked
        first = max(self._passed, marked - RING_SIZE + 1)
        if first < marked:
            try:
                with self._module.device(self._device):  # a thread's first call would make a context on device 0
                    first = bisect_left(range(marked), True, first, marked, key=self._is_ahead)
            except RuntimeError:
                return self._seen
        if self._marked - first >= RING_SIZE:  # meanwhile the host has used this mark again
            return self._seen
        self._passed = first
        self._seen = None
        if first < marked:
            finished = self._positions[(first - 1) % RING_SIZE].action if first else ""
            self._seen = DeviceLag(self._positions[first % RING_SIZE], finished)
        return self._seen

    def _is_ahead(self, mark: int) -> bool:
        """Whether the device has yet to pass a mark."""
        return not self._events[mark % RING_SIZE].query()
