"""Streams of the stand-in device, on which copies are made as late as a device may make them.

A copy that does not block, to pinned memory or on a side stream, waits in its stream until the host waits for an event
that was recorded after it, or the default stream does. Until then what it writes to holds garbage. If by then what it
reads is gone, another tensor may have got the memory, so it copies garbage. A tensor of one stream's memory may be used
on another, or freed while that fills it, only if it was told so (`record_stream`), and a side stream copies only what
it has waited for.

The device does what it is given, unless it hangs: from then on no event that is recorded is ever complete, and whatever
makes the host wait for the device waits. The host can go on to give it work.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

waits: Counter[str] = Counter()
"""How often the host has waited for the device, by what for."""

APART = " in a thread"
"""Ends the name of what a thread of Penstock's waited for, while the main thread went on."""

calls: Counter[str] = Counter()
"""How often events were made and used."""

GARBAGE = 77
"""What is where nothing has been copied yet."""

pinned: set[int] = set()
"""Where pinned memory begins."""

now = itertools.count(1)
"""Counts tensors as they are made, and waits."""

_ids = itertools.count()
_local = threading.local()


class Stream(torch.Stream):
    """Copies that were given and not made yet.

    Attributes:
        going: set, unless the device hangs.
    """

    going = threading.Event()
    going.set()

    def __new__(cls, device: Any = None) -> Stream:
        private_use = torch._C._autograd.DeviceType.PrivateUse1
        made: Stream = super().__new__(cls, stream_id=next(_ids), device_index=0, device_type=int(private_use))
        return made

    def __init__(self, device: Any = None) -> None:
        self._due: deque[Callable[[], None]] = deque()
        self.given = self._made = 0
        self.seen = 0
        """The time up to which it has waited for the default stream."""

    def give(self, copy: Callable[[], None]) -> None:
        self._due.append(copy)
        self.given += 1

    def make(self, count: int | None = None) -> None:
        """Makes the first copies of all that were ever given."""
        while self._due and self._made < (self.given if count is None else count):
            self._made += 1
            self._due.popleft()()

    def synchronize(self) -> None:
        wait("stream")
        self.make()

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:  # type: ignore[override]
        event.make()

    def wait_stream(self, other: Stream) -> None:  # type: ignore[override]
        self.seen = next(now)
        if self is DEFAULT:
            other.make()


DEFAULT = Stream()


def hang() -> None:
    """The device does none of the work that it is given from now on."""
    Stream.going = threading.Event()


def go_on() -> None:
    """The device does all that it has been given."""
    Stream.going.set()


def wait(what: str) -> None:
    """The host waits for the device."""
    waits[what + APART * threading.current_thread().name.startswith("penstock")] += 1
    Stream.going.wait()


class Event:
    """The moment at which the work given before is done, and the copies given to a stream are made."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        calls["Event"] += 1
        self._timed = enable_timing
        self._done = Stream.going
        self._stream, self._count, self._at = DEFAULT, 0, 0

    def record(self, stream: Stream | None = None) -> None:
        calls["record"] += 1
        self._stream = current() if stream is None else stream
        self._done, self._count, self._at = Stream.going, self._stream.given, perf_counter_ns()

    def make(self) -> None:
        self._stream.make(self._count)

    def query(self) -> bool:
        calls["query"] += 1
        return self._done.is_set()

    def synchronize(self) -> None:
        wait("event")
        self.make()

    def elapsed_time(self, later: Event) -> float:
        """In milliseconds."""
        calls["elapsed_time"] += 1
        assert self._timed, "made without enable_timing=True"
        assert later._timed, "made without enable_timing=True"
        return (later._at - self._at) / 1e6


def current(device: Any = None) -> Stream:
    """The thread's stream."""
    found: Stream = getattr(_local, "stream", DEFAULT)
    return found


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Work is given to a stream."""
    before, _local.stream = current(), stream
    try:
        yield
    finally:
        _local.stream = before


def check_used_here(tensors: Iterable[Any]) -> None:
    """Raises RuntimeError if a side stream's memory is used on a stream that it was not told of."""
    here = current().stream_id
    for tensor in tensors:
        if not tensor.streams & {here, DEFAULT.stream_id}:
            raise RuntimeError(f"memory of streams {tensor.streams} is used on {here} without record_stream")


def copies_later(target: Any, source: Any, non_blocking: bool = False) -> bool:
    """Leaves a copy to the current stream, if a device would."""
    stream, to_host = current(), target.device.type == "cpu"
    if to_host:
        later = non_blocking and target.untyped_storage().data_ptr() in pinned
    else:
        later = stream is not DEFAULT and (non_blocking or source.device.type != "cpu")
    if not (later and target.numel()):
        return False
    foreign = source.device.type != "cpu" and stream is not DEFAULT and stream.stream_id not in source.streams
    if foreign and source.made_at > stream.seen:
        raise RuntimeError("a side stream reads what the default stream may not have computed yet")
    into: Tensor = target if to_host else target.values
    read: Callable[[], Any] = weakref.ref(source) if to_host else lambda: source
    filled, told = weakref.ref(target), set() if to_host else target.streams
    into.copy_(torch.full_like(into, GARBAGE))

    def copy() -> None:
        if not to_host and filled() is None and stream.stream_id not in told:
            raise RuntimeError("memory is freed that a side stream has still to fill")
        found = read()
        if found is not None:
            into.copy_(found if found.device.type == "cpu" else found.values)

    stream.give(copy)
    return True


def install_pinned_memory() -> None:
    """Has torch make pinned memory, which it does for devices only of which it knows how."""
    for name in ("empty", "empty_strided"):
        setattr(torch, name, _pinning(getattr(torch, name)))


def _pinning(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def made(*args: Any, pin_memory: bool = False, **given: Any) -> Tensor:
        tensor = make(*args, **given)
        if pin_memory:
            pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    return made
