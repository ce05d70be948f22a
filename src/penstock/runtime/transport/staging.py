"""A device's tensors on the host: copied there and back through pinned memory, on streams of their own.

Only a thread (`SerialWorker`) waits for the device, and only for the copies: the host goes on giving work to
the device, and the device goes on computing. Pinned memory comes from torch's caching allocator, which keeps what is
freed for the next tensor of its size, and hands it out only once the copies from it and to it have been made.

`StagedTransport` serves devices that cannot reach each other, or that several ranks share: what a rank sends goes on as
between ranks on the CPU: through shared memory on one machine, over gloo's sockets between machines. What the host
waits for is that a message has arrived, as there.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.agreement import Agreement
from penstock.runtime.transport.distributed import SENDS_IN_FLIGHT
from penstock.runtime.transport.protocol import Channel, Combined, Message, Pending, Reduce, Transport

HOST = torch.device("cpu")


class Staging:
    """One device's way to the host and back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module: Any = torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device), self._module.Stream(device)
        self._worker = SerialWorker("penstock-staging")
        self._worker.issue(partial(self._module.set_device, device))  # a thread begins on the first one

    def copy_to_host(self, message: Message, deliver_to: Callable[[list[Tensor | None]], object]) -> Operation:
        """Start to copy tensors to the host, and call `deliver_to` with them, laid out alike, once they are there.

        What was to leave earlier is done with by then: everything leaves in one order. If there is no tensor, nothing
        waits for the device.
        """
        if all(tensor is None for tensor in message):
            return self._worker.issue(partial(deliver_to, list(message)))
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
            deliver_to([None if buffer is None else exact.unpack(buffer) for buffer in buffers])

        return self._worker.issue(deliver)

    def copy_to_device(self, message: Message) -> list[Tensor | None]:
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
        return lambda tensors: _HostReduction(self, tensors, reduce)

    def synchronize(self) -> None:
        """Wait until everything has left. Raise the first error in what was called then."""
        self._worker.synchronize()

    def close(self) -> None:
        """End the thread once everything has left."""
        self._worker.end()


class HostOperation:
    """Tensors that were sent to the host, for what a thread starts with them there."""

    def __init__(self, staging: Staging, tensors: Message, start: Callable[[Message], Pending]) -> None:
        self._started: list[Pending] = []
        self._departure = staging.copy_to_host(tensors, lambda host: self._started.append(start(host)))

    def wait(self) -> None:
        self._departure.wait()
        for started in self._started:
            started.wait()


class _HostReduction(HostOperation):
    """Tensors that other processes change on the host."""

    def __init__(self, staging: Staging, tensors: Sequence[Tensor], reduce: Reduce) -> None:
        def start(host: Any) -> Pending:
            self._host: Sequence[Tensor] = host
            return reduce(host)

        self._tensors = tuple(tensors)
        super().__init__(staging, tensors, start)

    def wait(self) -> None:
        super().wait()
        for tensor, changed in zip(self._tensors, self._host, strict=True):
            tensor.copy_(changed, non_blocking=True)


@dataclass(slots=True)
class Operation:
    """An operation of a `SerialWorker`, as `torch.distributed` returns a `Work`."""

    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None

    def wait(self, timeout: Any = None) -> bool:
        """Wait until the operation has run. Raise what it raised."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        return self.ended.is_set()


class SerialWorker:
    """Runs operations one after another, in the order in which they were issued.

    The thread is a daemon: one that waits for a rank that is gone keeps no process alive.
    """

    def __init__(self, name: str) -> None:
        self._queue: SimpleQueue[tuple[Operation, Callable[[], object]] | None] = SimpleQueue()
        self._last: Operation | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve, daemon=True, name=name)
        self._thread.start()

    def issue(self, run: Callable[[], object], operation: Operation | None = None) -> Operation:
        """Queue what `operation` stands for (by default a new one)."""
        self._last = operation or Operation()
        self._queue.put((self._last, run))
        return self._last

    def synchronize(self) -> None:
        """Wait for everything that was issued. Raise what the first operation that failed raised."""
        if self._last is not None:
            self._last.ended.wait()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the thread once everything has run."""
        self._queue.put(None)

    def _serve(self) -> None:
        while (issued := self._queue.get()) is not None:
            operation, run = issued
            try:
                run()
            except BaseException as error:  # `wait` raises it
                operation.error = error
                self._error = self._error or error
            del issued, run  # with what it held
            operation.ended.set()


class StagedTransport(Combined):
    """A transport for tensors on the host (`messages`), for those on a device."""

    def __init__(self, inner: Transport, staging: Staging) -> None:
        super().__init__(inner.rank, inner.ranks, inner, inner)
        self._staging = staging
        self._channels: dict[int, list[StagedChannel]] = {}

    def connect(self, source_rank: int, target_rank: int) -> None:
        self._staging.synchronize()
        super().connect(source_rank, target_rank)

    def channel(self, number: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> StagedChannel:
        inner = super().channel(number, link, source_rank, target_rank, backward=backward)
        channel = StagedChannel(inner, link, self._staging)
        self._channels.setdefault(number, []).append(channel)
        return channel

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        return self._staging.around(partial(super().reduce, group, holders))(tensors)

    def release(self, number: int) -> None:
        self._staging.synchronize()
        self._channels.pop(number, None)
        super().release(number)

    def end_step(self) -> None:
        learned = [channel.agreement.end_step() for channels in self._channels.values() for channel in channels]
        if any(learned):
            self._staging.synchronize()  # the channels inside must have seen what these have
        super().end_step()

    def close(self) -> None:
        self._staging.synchronize()
        super().close()


class StagedChannel:
    """One link's messages to or from one other rank."""

    def __init__(self, inner: Channel, link: Link, staging: Staging) -> None:
        self._inner = inner
        self._staging = staging
        self.agreement = Agreement(link)
        self._leaving: deque[Operation] = deque()

    def send(self, microbatch: int, message: Message) -> None:
        self.agreement.check(microbatch, message)  # raises here; the inner channel's, in its thread, then cannot
        while len(self._leaving) >= SENDS_IN_FLIGHT:
            self._leaving.popleft().wait()
        self._leaving.append(self._staging.copy_to_host(message, partial(self._inner.send, microbatch)))

    def post(self, microbatch: int) -> None:
        self._inner.post(microbatch)

    def receive(self, microbatch: int) -> list[Tensor | None]:
        return self._staging.copy_to_device(self._inner.receive(microbatch))
