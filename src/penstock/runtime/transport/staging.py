"""A device's tensors on the host: copied there and back through pinned memory, on streams of their own.

Nothing waits for the device but a thread (`Courier`), and that for the copies alone: the host goes on giving work to
the device, and the device goes on computing. Pinned memory comes from torch's caching allocator, which keeps what is
freed for the next tensor of its size, and hands it out only once the copies from it and to it have been made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.courier import Courier, Operation
from penstock.runtime.transport.protocol import Message, Pending

HOST = torch.device("cpu")

Reduce = Callable[[Sequence[Tensor]], Pending]
"""Starts something that several processes do with tensors, in place."""


class Staging:
    """One device's way to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device), self._module.Stream(device)
        self._courier = Courier("penstock-staging")
        self._courier.issue(partial(self._module.set_device, device))  # a thread begins on the first one

    def leave(self, message: Message, then: Callable[[list[Tensor | None]], object]) -> Operation:
        """Starts to copy tensors to the host, and has `then` called with them, laid out alike, once they are there.

        What was to leave earlier is done with by then: everything leaves in one order. If there is no tensor, nothing
        waits for the device.
        """
        if all(tensor is None for tensor in message):
            return self._courier.issue(partial(then, list(message)))
        flats = [None if tensor is None else exact.pack(tensor) for tensor in message]
        buffers = [None if t is None else exact.allocate(Layout.of(t), HOST, pinned=True) for t in message]
        self._out.wait_stream(self._module.current_stream(self.device))
        with self._module.stream(self._out):
            for buffer, flat in zip(buffers, flats, strict=True):
                if buffer is not None and flat is not None:
                    buffer.flat.copy_(flat, non_blocking=True)
            copied = self._out.record_event(self._module.Event(blocking=True))  # the thread sleeps, and does not spin

        def deliver() -> None:
            copied.synchronize()
            flats.clear()  # held until now, so that no other tensor got their memory
            then([None if buffer is None else exact.unpack(buffer) for buffer in buffers])

        return self._courier.issue(deliver)

    def arrive(self, message: Message) -> list[Tensor | None]:
        """Tensors on the device, laid out like those on the host. What is computed with them waits for the copies."""
        with self._module.stream(self._back):  # their memory is this stream's: the copies wait for nothing
            arrived = [
                None if t is None else exact.copy_as(Layout.of(t), t, self.device, non_blocking=True) for t in message
            ]
            copied = self._back.record_event()
        computing = self._module.current_stream(self.device)
        computing.wait_event(copied)
        for tensor in arrived:
            if tensor is not None:
                tensor.record_stream(computing)
        return arrived

    def around(self, reduce: Reduce) -> Reduce:
        """`reduce`, which takes tensors on the host, for tensors on the device."""
        return lambda tensors: _Away(self, tensors, reduce)

    def synchronize(self) -> None:
        """Waits until everything has left. Raises the first error in what was called then."""
        self._courier.synchronize()

    def close(self) -> None:
        """Ends the thread once everything has left."""
        self._courier.end()


class _Away:
    """Tensors that other processes change on the host."""

    def __init__(self, staging: Staging, tensors: Sequence[Tensor], reduce: Reduce) -> None:
        self._tensors = tuple(tensors)
        self._host: Sequence[Tensor] = ()
        self._reduce = reduce
        self._left = staging.leave(tensors, self._start)

    def wait(self) -> None:
        self._left.wait()
        self._pending.wait()
        for tensor, changed in zip(self._tensors, self._host, strict=True):
            tensor.copy_(changed, non_blocking=True)

    def _start(self, host: Sequence[Any]) -> None:
        self._host, self._pending = host, self._reduce(host)


class Departed:
    """Tensors that were sent to the host, for what a thread starts with them there."""

    def __init__(self, staging: Staging, tensors: Message, start: Callable[[Message], Pending]) -> None:
        self._started: list[Pending] = []
        self._left = staging.leave(tensors, lambda host: self._started.append(start(host)))

    def wait(self) -> None:
        self._left.wait()
        for started in self._started:
            started.wait()
