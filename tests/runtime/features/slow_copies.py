"""A stand-in for a device's streams, on plain CPU tensors: computation is done at once, a copy once it is waited for.

So a copy that nothing waits for is not made; one whose source has changed meanwhile copies that; and one whose memory
has been freed meanwhile is noted.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.runtime.execute import executor
from penstock.runtime.features import offload


class Event:
    """The end of what a stream has been given."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.place = stream, len(stream.queue)

    def happen(self) -> None:
        self.stream.run(self.place)


class Stream:
    """A queue of copies and waits, run as late as possible."""

    def __init__(self, owner: SlowCopies | None = None) -> None:
        self.owner = owner
        self.queue: list[Callable[[], None]] = []
        self.done = 0
        self.has_waited = False

    def record_event(self) -> Event:
        return Event(self)

    def wait_stream(self, other: Stream) -> None:
        self.has_waited = True
        self.wait_event(Event(other))

    def wait_event(self, event: Event) -> None:
        self.queue.append(event.happen)

    def run(self, place: int) -> None:
        while self.done < place:
            self.done += 1
            self.queue[self.done - 1]()


class Computing(Stream):
    """The stream that computes: its work is done when it is given."""

    def wait_event(self, event: Event) -> None:
        event.happen()


class SlowCopies:
    """A device's module, and what happened.

    Attributes:
        wrong: what was freed although a copy read it or would fill it.
        log: for each copy, what it was, the action whose forward made the tensor, and the action that ran.
        running: the action that runs.
        on_end: called when an action ends.
    """

    def __init__(self) -> None:
        self.computing, self.streams = Computing(), list[Stream]()
        self.wrong: list[str] = []
        self.log: list[tuple[str, str, str]] = []
        self.running = ""
        self.on_end: Callable[[str], None] = lambda _: None
        self._sent_in: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._memory: weakref.WeakKeyDictionary[Any, _Memory] = weakref.WeakKeyDictionary()
        self._on_device: dict[str, list[weakref.ref[Any]]] = {}

    def Stream(self, device: Any = None) -> Stream:  # noqa: N802 (torch's name)
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, device: Any = None) -> Stream:
        return self.computing

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        assert stream.has_waited, "neither for what has been computed, nor for its memory to be free"
        stream.has_waited = False
        with _Queueing(self, stream):
            yield

    def record_stream(self, tensor: Tensor) -> None:
        self._memory[tensor.untyped_storage()].is_recorded = True

    def copy(self, stream: Stream, target: Tensor, source: Tensor) -> None:
        """Queues a copy, which keeps neither tensor."""
        leaves = stream is self.streams[0]
        host, device = (target, source) if leaves else (source, target)
        if leaves:
            self._sent_in[host.untyped_storage()] = self.running
        sent_in = self._sent_in[host.untyped_storage()]
        self.log.append(("send" if leaves else "fetch", sent_in, self.running))
        self._on_device.setdefault(sent_in, []).append(weakref.ref(device.untyped_storage()))
        memory = self._memory.setdefault(device.untyped_storage(), _Memory())
        target.view(-1).view(torch.uint8).fill_(0xAA)
        there, here = _Weak(host), _Weak(device)

        def copy() -> None:
            host, device = there.tensor(), here.tensor()
            if device is not None and host is not None:
                (host.copy_(device) if leaves else device.copy_(host))
            elif device is None and not memory.is_recorded and (not leaves or host is not None):
                self.wrong.append(f"what {sent_in} {'sent' if leaves else 'sent, and was fetched,'} is freed")

        stream.queue.append(copy)

    def alive(self) -> set[str]:
        """The actions of which anything that they sent is on the device."""
        return {action for action, refs in self._on_device.items() if any(ref() is not None for ref in refs)}

    def finish(self) -> None:
        """Makes all copies."""
        for stream in self.streams:
            stream.run(len(stream.queue))


class _Memory:
    is_recorded = False


class _Weak:
    """A tensor, without keeping its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._storage = weakref.ref(tensor.untyped_storage())
        self._dtype, self._place = tensor.dtype, (tensor.storage_offset(), tensor.shape, tensor.stride())

    def tensor(self) -> Tensor | None:
        storage = self._storage()
        return None if storage is None else torch.empty(0, dtype=self._dtype).set_(storage, *self._place)


class _Queueing(TorchDispatchMode):
    def __init__(self, copies: SlowCopies, stream: Stream) -> None:
        super().__init__()
        self._copies, self._queue_of = copies, stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, func
        assert args[2] if len(args) > 2 else (kwargs or {})["non_blocking"], "the host waits"
        self._copies.copy(self._queue_of, args[0], args[1])  # no mode is on in here
        return args[0]


def install(monkeypatch: pytest.MonkeyPatch) -> SlowCopies:
    """Every stage's copies go by slow streams."""
    copies = SlowCopies()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "get_device_module", lambda _: copies)
        lanes = offload.CopyStreams(torch.device("cpu"))
    monkeypatch.setattr(offload, "copy_streams_for", lambda _: lanes)
    monkeypatch.setattr(Tensor, "record_stream", _record_stream)
    bind = executor.with_neighbors

    def noting(*given: Any) -> list[executor.BoundAction]:
        return [replace(each, work=_noted(copies, each)) for each in bind(*given)]

    monkeypatch.setattr(executor, "with_neighbors", noting)
    return copies


def _record_stream(tensor: Tensor, stream: Stream) -> None:
    assert stream.owner is not None
    stream.owner.record_stream(tensor)


def _noted(copies: SlowCopies, each: executor.BoundAction) -> Callable[..., None]:
    def noted(*ready: Any) -> None:
        copies.running = str(each.action)
        each.work(*ready)
        copies.on_end(copies.running)

    return noted
