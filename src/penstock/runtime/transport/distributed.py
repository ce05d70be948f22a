"""The transport over `torch.distributed` point-to-point: gloo on CPU, NCCL on GPUs.

In a channel's first step each message is preceded by a header with its layout, and a receive starts when a rank waits
for it, or for one posted later. From the second step on layouts are known: receives are posted ahead into fresh memory,
only payload is sent, and a sender whose tensor is not as agreed raises before sending anything.

Messages follow NCCL's rules, on gloo too, so that what is tested on one holds on the other. There are no tags: a rank's
sends to another match that rank's receives in order (`ReceiveOrder`). The first operation of two ranks, which waits for
both, is `connect`. Messages are sent as bytes, since NCCL has no type for some of torch's.

All messages from one rank to another are received in one order, whatever their links. Back ends without tags (NCCL)
match the k-th message that a rank sends another with the k-th receive that the other starts. Schedules post receives in
the order of the peer's sends (`check` proves it), so receives start in the order in which they were posted, even if
they cannot start immediately: while layouts are learned, a receive has to wait for a header. It starts when it is
needed, after all receives posted before it.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from penstock._base.stages import Link
from penstock.distributed.groups import Groups
from penstock.runtime.exact import rules as exact
from penstock.runtime.transport.agreement import Agreement, Layouts
from penstock.runtime.transport.protocol import BROADCASTS_IN_FLIGHT, Begun, Message, Observer, Pending
from penstock.schedule import Action, Op

SENDS_IN_FLIGHT = 2
"""How many sends of a channel may be in flight; the third waits for the first, so that its memory is freed."""

HEADER_BYTES = 2048
"""The size of a header, for each value of its link: more than a pickled layout of as many dimensions as torch has."""


class DistributedTransport:
    """One rank's side. `rank` counts within the pipeline; `groups.members` are the global ranks.

    `pinned`: what arrives goes on to another device, so it is put into pinned memory. `observer`: see `Observable`.
    """

    def __init__(self, rank: int, groups: Groups, device: torch.device, *, pinned: bool = False) -> None:
        self.rank = rank
        self.ranks = len(groups.members)
        self.device = device
        self._pinned = pinned
        self._groups = groups
        self._channels: dict[int, list[DistributedChannel]] = {}
        self._orders: dict[tuple[int, int], ReceiveOrder] = {}
        self._broadcasts: deque[Pending] = deque()
        self.observer: Observer | None = None

    def connect(self, source_rank: int, target_rank: int) -> None:
        group, token = self._groups.way(source_rank, target_rank), torch.zeros(1, dtype=torch.uint8, device=self.device)
        if self.rank == source_rank:
            work = dist.isend(token, self._groups.members[target_rank], group=group)
        else:
            work = dist.irecv(token, self._groups.members[source_rank], group=group)
        if work is not None:
            work.wait()

    def channel(
        self, number: int, link: Link, source_rank: int, target_rank: int, *, backward: bool
    ) -> DistributedChannel:
        order = self._orders.setdefault((source_rank, target_rank), ReceiveOrder())
        peer = target_rank if source_rank == self.rank else source_rank
        group = partial(self._groups.way, source_rank, target_rank)
        observe = self._observation(link, (source_rank, target_rank), backward=backward)
        global_rank = self._groups.members[peer]
        make = self.channel_to(peer, (number, link, backward))
        channel = make(link, group, global_rank, order, self.device, observe, pinned=self._pinned)
        self._channels.setdefault(number, []).append(channel)
        return channel

    def channel_to(self, peer: int, key: tuple[int, Link, bool]) -> Callable[..., DistributedChannel]:
        """Return what makes the channels to and from a rank; `key`: see `PointToPoint.channel`."""
        return DistributedChannel

    def _observation(self, link: Link, ranks: tuple[int, int], *, backward: bool) -> Callable[[int], Begun | None]:
        """Return what a channel calls before each of its messages, to notify the observer, if there is one."""
        if ranks[0] == self.rank:
            stage, op, peer = link.source, Op.SEND_B if backward else Op.SEND_F, link.target
        else:
            stage, op, peer = link.target, Op.RECV_B if backward else Op.RECV_F, link.source

        def observe(microbatch: int) -> Begun | None:
            return self.observer and self.observer(Action(stage, op, microbatch, peer), ranks)

        return observe

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        return all_reduce(tensors, self._groups[tuple(sorted(holders))])

    def broadcast(self, value: Tensor, source_rank: int) -> Pending:
        while len(self._broadcasts) >= BROADCASTS_IN_FLIGHT:
            self._broadcasts.popleft().wait()  # finished long ago, but pending work must not be dropped
        self._broadcasts.append(broadcast_from([source_rank], [value], self._groups["pipeline"]))
        return self._broadcasts[-1]

    def release(self, number: int) -> None:
        for channel in self._channels.pop(number, ()):
            channel.close()

    def drop_step(self) -> None:
        """Do nothing: between processes no step follows one that raised."""

    def end_step(self) -> None:
        for channels in self._channels.values():
            for channel in channels:
                channel.end_step()

    def close(self) -> None:
        for number in list(self._channels):
            self.release(number)
        while self._broadcasts:
            self._broadcasts.popleft().wait()


class DistributedChannel:
    """One link's messages to or from one other rank."""

    def __init__(
        self,
        link: Link,
        group: Callable[[], dist.ProcessGroup],
        peer: int,
        order: ReceiveOrder,
        device: torch.device,
        observe: Callable[[int], Begun | None],
        *,
        pinned: bool,
    ) -> None:
        self._link = link
        self._group = group
        self._peer = peer
        self._order = order
        self._device = device
        self._observe = observe
        self.pinned = pinned
        self.agreement = Agreement(link)
        self._sends: deque[tuple[list[dist.Work], list[Tensor]]] = deque()
        self._posted: dict[int, tuple[list[exact.Buffer | None], list[dist.Work]]] = {}

    def send(self, microbatch: int, message: Message) -> None:
        layouts = self.agreement.check(microbatch, message)
        if self.agreement.learning:
            self._start_send([self._header(layouts).to(self._device)])
        begun = self._observe(microbatch)
        self._start_send([exact.pack(t).view(torch.uint8) for t in message if t is not None and t.numel()])
        if begun is not None:
            begun(self._sends[-1][0])
        if not self.agreement.learning:
            while len(self._sends) > SENDS_IN_FLIGHT:
                self._finish_send()

    def post(self, microbatch: int) -> None:
        self._order.post(self, microbatch)

    def receive(self, microbatch: int) -> list[Tensor | None]:
        self._order.start_until(self, microbatch)
        buffers, works = self._posted.pop(microbatch)
        for work in works:
            work.wait()
        return [None if buffer is None else exact.unpack(buffer) for buffer in buffers]

    @property
    def can_start(self) -> bool:
        """Whether a receive can start without waiting: its layouts are known."""
        return not self.agreement.learning

    def has_started(self, microbatch: int) -> bool:
        """Whether a receive was started."""
        return microbatch in self._posted

    def start(self, microbatch: int) -> None:
        """Start a receive. Called in the order in which the other rank sends."""
        if self.agreement.learning:
            self.agreement.learn(microbatch, self._receive_header())
        begun = self._observe(microbatch)
        self._posted[microbatch] = self._start_receive(self.agreement[microbatch])
        if begun is not None:
            begun(self._posted[microbatch][1])

    def end_step(self) -> None:
        if self.agreement.end_step():
            self.drain()

    def drain(self) -> None:
        """Wait until every send has arrived."""
        while self._sends:
            self._finish_send()

    def close(self) -> None:
        """Free everything, once every send has arrived."""
        self.drain()

    def _start_send(self, tensors: list[Tensor]) -> None:
        works = [dist.isend(t, self._peer, group=self._group()) for t in tensors]
        self._sends.append(([work for work in works if work is not None], tensors))

    def _finish_send(self) -> None:
        works, _ = self._sends[0]
        for work in works:
            work.wait()
        self._sends.popleft()

    def _start_receive(self, layouts: Layouts) -> tuple[list[exact.Buffer | None], list[dist.Work]]:
        buffers = [
            None if layout is None else exact.allocate(layout, self._device, pinned=self.pinned) for layout in layouts
        ]
        works = [
            dist.irecv(buffer.flat.view(torch.uint8), self._peer, group=self._group())
            for buffer in buffers
            if buffer is not None and buffer.flat.numel()
        ]
        return buffers, [work for work in works if work is not None]

    def _header(self, layouts: Layouts) -> Tensor:
        """The layouts of a message."""
        header = torch.zeros(HEADER_BYTES * len(layouts), dtype=torch.uint8)
        data = bytearray(pickle.dumps(layouts))
        header[: len(data)] = torch.frombuffer(data, dtype=torch.uint8)
        return header

    def _receive_header(self) -> Layouts:
        header = torch.empty(HEADER_BYTES * len(self._link.values), dtype=torch.uint8, device=self._device)
        work = dist.irecv(header, self._peer, group=self._group())
        if work is not None:
            work.wait()
        layouts: Layouts = pickle.loads(header.cpu().numpy().tobytes())
        return layouts


def all_reduce(tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Pending:
    """Start to sum each tensor, in place, over a group."""
    return _Works([dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors])


def broadcast_from(sources: Sequence[int], tensors: Sequence[Tensor], group: dist.ProcessGroup) -> Pending:
    """Start to copy each tensor, in place, from a process of the group, by its rank there, to the others."""
    pairs = zip(tensors, sources, strict=True)
    return _Works([dist.broadcast(tensor, group=group, group_src=rank, async_op=True) for tensor, rank in pairs])


class _Works:
    """Pending operations."""

    def __init__(self, works: list[dist.Work | None]) -> None:
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            if work is not None:
                work.wait()
        self._works.clear()


class ReceiveOrder:
    """The receives from one rank, first in, first out."""

    def __init__(self) -> None:
        self._due: deque[tuple[DistributedChannel, int]] = deque()

    def post(self, receiver: DistributedChannel, microbatch: int) -> None:
        """Queue a receive, and start those that can start without waiting. Never blocks."""
        self._due.append((receiver, microbatch))
        while self._due and self._due[0][0].can_start:
            self._start_next()

    def start_until(self, receiver: DistributedChannel, microbatch: int) -> None:
        """Start receives in order until this one has started.

        This waits no longer than necessary: what was posted earlier was sent earlier.
        """
        while not receiver.has_started(microbatch):
            self._start_next()

    def _start_next(self) -> None:
        receiver, microbatch = self._due.popleft()
        receiver.start(microbatch)
