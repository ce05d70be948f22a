"""The transport for devices that cannot reach each other, or that several ranks share: through the host's memory.

What a rank sends is copied to pinned memory (`Staging`), and goes on as between ranks on the CPU: through shared memory
on one machine, over gloo's sockets between machines. What the host waits for is that a message has arrived, as there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial

from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.transport.agreement import Agreement
from penstock.runtime.transport.courier import Operation
from penstock.runtime.transport.distributed import SENDS_IN_FLIGHT
from penstock.runtime.transport.paired import Paired
from penstock.runtime.transport.protocol import Channel, Message, Pending, Transport
from penstock.runtime.transport.staging import Staging


class StagedTransport(Paired):
    """A transport for tensors on the host (`messages`), for those on a device."""

    def __init__(self, inner: Transport, staging: Staging) -> None:
        super().__init__(inner.rank, inner.ranks, inner, inner)
        self._staging = staging
        self._channels: dict[int, list[StagedChannel]] = {}

    def connect(self, source_rank: int, target_rank: int) -> None:
        self._staging.synchronize()
        super().connect(source_rank, target_rank)

    def channel(self, program: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> StagedChannel:
        inner = super().channel(program, link, source_rank, target_rank, backward=backward)
        channel = StagedChannel(inner, link, self._staging)
        self._channels.setdefault(program, []).append(channel)
        return channel

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        return self._staging.around(partial(super().reduce, group, holders))(tensors)

    def release(self, program: int) -> None:
        self._staging.synchronize()
        self._channels.pop(program, None)
        super().release(program)

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
        self.agreement.check(microbatch, message)
        while len(self._leaving) >= SENDS_IN_FLIGHT:
            self._leaving.popleft().wait()
        self._leaving.append(self._staging.leave(message, partial(self._inner.send, microbatch)))

    def post(self, microbatch: int) -> None:
        self._inner.post(microbatch)

    def receive(self, microbatch: int) -> list[Tensor | None]:
        return self._staging.arrive(self._inner.receive(microbatch))
