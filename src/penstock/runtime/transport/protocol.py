"""The protocols between the executor and whatever moves tensors from rank to rank.

`PointToPoint` carries messages between stages, `Collectives` does what several ranks do together, and a `Transport` is
both. A channel carries one link's messages in one direction, one message per microbatch. The implementations are
interchangeable; `penstock.testing.check_transport` runs the same tests on each.

To use your own transport, pass a factory (`pipeline(transport=...)`), which makes one rank's side of it from an
`Endpoint`. If that side is only a `PointToPoint`, `torch.distributed` does the collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.schedule import Action

BROADCASTS_IN_FLIGHT = 4
"""How many values from one rank may be in flight: two steps' losses and announcements. The next one waits for the first
to arrive, so that unread values do not pile up."""

Message = Sequence[Tensor | None]
"""What is sent for one microbatch: a tensor or None for each value of the link."""


class Channel(Protocol):
    """One link's messages in one direction, seen from one of its two ranks.

    Microbatch numbers start again at 0 in every step, and messages with the same number arrive in the order in which
    they were sent. If the other rank is gone, a method may raise OSError or RuntimeError, or wait forever: the watchdog
    notices either, and ends the run with the cause.
    """

    def send(self, microbatch: int, message: Message) -> None:
        """Start sending. The tensors belong to the channel from here on: they may be read, never written.

        Raises:
            ShapeError: a tensor does not have the layout that was agreed on in the first step.
        """

    def post(self, microbatch: int) -> None:
        """Prepare to receive a message, so that it can arrive while the rank computes. Never blocks.

        Every message is posted exactly once. A rank posts all messages from one other rank, over all their channels, in
        the order in which that rank sends them.
        """

    def receive(self, microbatch: int) -> list[Tensor | None]:
        """Wait for a posted message. Each tensor has its own memory and keeps its strides and alignment."""


class Pending(Protocol):
    """A collective or a message that has been started, such as torch's `Work`."""

    def wait(self) -> object:
        """Wait until the tensors that it was started with hold the result. On a device, only its stream waits."""


Reduce = Callable[[Sequence[Tensor]], Pending]
"""Starts something that several processes do with tensors, in place, such as their sum, with the same bits on each."""


class PointToPoint(Protocol):
    """Moves messages between the stages of one pipeline; one object per rank."""

    def connect(self, source_rank: int, target_rank: int) -> None:
        """Prepare for messages from one rank to another, before the first of them. May wait for the other rank.

        Both ranks of the pair call it, and every rank goes through its pairs in the same order.
        """

    def channel(self, number: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Channel:
        """Return a link's channel in one direction, for the bound schedule of this number. Each of the two ranks asks
        for it once.

        `(number, link, backward)` identifies both ends of a channel: use it as the key. `source_rank` is the rank that
        sends on it, `target_rank` the rank that receives.
        """

    def release(self, number: int) -> None:
        """Free what the channels with this number hold. Both ends call it between the same two steps, and do not use
        them again."""

    def end_step(self) -> None:
        """End a step whose messages this rank has all sent and received. The layouts of a channel's first step are
        binding from then on, unless the link varies. May wait for the other rank to take what this one sent."""

    def drop_step(self) -> None:
        """Called instead of `end_step` if the step raised here. Never waits for another rank.

        Where one process drives all ranks, it drops the step of each of them, and another step may follow, over the
        same channels and with the same numbers. Nothing of the dropped one may show in it: neither messages sent or
        posted, nor sums and broadcasts that some rank had not begun, nor layouts of a channel's first step.

        Where each rank is a process of its own, no step follows, nor `close`: the others may be anywhere in the step,
        so the run ends on all of them. There is nothing to discard then.
        """

    def close(self) -> None:
        """Called once, after the last step. What this rank sent still arrives, even if the other rank takes it only
        later; then everything is freed. May wait for that, but not for the other rank to close.
        """


class Collectives(Protocol):
    """Operations that several ranks of a pipeline do together; one object per rank."""

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        """Start to sum each tensor, in place, over the ranks `holders`, with the same bits on each of them.

        Every holder passes tensors of the same shapes, and starts its reductions in ascending order of `group`.
        """

    def broadcast(self, value: Tensor, source_rank: int) -> Pending:
        """Start to copy a small float64 tensor on the CPU, in place, from one rank to all. Never blocks."""

    def close(self) -> None:
        """Wait for pending collectives and free everything. Called once, after the last step."""


class Transport(PointToPoint, Collectives, Protocol):
    """Everything sent between the ranks of one pipeline; one object per rank, which knows its own rank."""

    rank: int
    ranks: int


Begun = Callable[[Sequence[Pending]], None]
"""Called once a message has begun, with what waits for it."""

Observer = Callable[[Action, tuple[int, int]], Begun]
"""Called when a message is about to begin, with its `SEND` or `RECV`, and its source and target rank."""


@runtime_checkable
class Observable(Protocol):
    """A transport whose messages have their own streams on a device. It calls `observer` for each; None: no one."""

    observer: Observer | None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The rank for which a factory makes its side of a transport.

    Attributes:
        rank: the rank's number within the pipeline, as for all ranks that a transport is given.
        members: each rank's global rank in `torch.distributed`.
        device: the device of the tensors that this rank sends, and of those that it is to receive.
        gather: returns each rank's object, by rank, on every rank, to exchange addresses; all ranks call it equally
            often.
    """

    rank: int
    members: tuple[int, ...]
    device: torch.device
    gather: Callable[[Any], list[Any]]

    @property
    def ranks(self) -> int:
        """How many ranks the pipeline has."""
        return len(self.members)


TransportFactory = Callable[[Endpoint], PointToPoint]
"""Makes one rank's side of a transport. Every rank's process calls the same factory, once per pipeline."""

POINT_TO_POINT = ("connect", "channel", "release", "end_step", "drop_step", "close")
COLLECTIVES = ("reduce", "broadcast", "close")
"""The methods of each protocol, by which an object without a base class is recognized."""


def missing_methods(instance: object, methods: Sequence[str]) -> list[str]:
    """Return which of these methods an object lacks."""
    return [name for name in methods if not callable(getattr(instance, name, None))]


class Combined:
    """One rank's side. Both parts may be one object."""

    def __init__(self, rank: int, ranks: int, messages: PointToPoint, collectives: Collectives) -> None:
        self.rank = rank
        self.ranks = ranks
        self.messages = messages
        self._collectives = collectives

    def connect(self, source_rank: int, target_rank: int) -> None:
        self.messages.connect(source_rank, target_rank)

    def channel(self, number: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Channel:
        return self.messages.channel(number, link, source_rank, target_rank, backward=backward)

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        return self._collectives.reduce(group, holders, tensors)

    def broadcast(self, value: Tensor, source_rank: int) -> Pending:
        return self._collectives.broadcast(value, source_rank)

    def release(self, number: int) -> None:
        self.messages.release(number)

    def end_step(self) -> None:
        self.messages.end_step()

    def drop_step(self) -> None:
        self.messages.drop_step()

    def close(self) -> None:
        parts: tuple[PointToPoint | Collectives, ...] = (self.messages, self._collectives)
        for part in {id(part): part for part in parts}.values():
            part.close()
