"""The protocol between the executor and whatever moves tensors from rank to rank.

A channel carries one link's messages in one direction, one message for each microbatch. The implementations are
interchangeable; `penstock.testing.check_transport` holds each against the same tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from penstock.stages import Link

Message = Sequence[Tensor | None]
"""What travels for one microbatch: a tensor, or None, for each value of the link."""


class Channel(Protocol):
    """One link's messages in one direction, seen from one of its two ranks."""

    def send(self, microbatch: int, message: Message) -> None:
        """Starts sending. The tensors belong to the channel from here on: they may be read, never written.

        Raises:
            ShapeError: a tensor is not of the layout that was agreed on in the first step.
        """

    def post(self, microbatch: int) -> None:
        """Makes ready to receive a message, so that it can arrive while the rank computes. Never blocks.

        Every message is posted once, and of all channels from one rank to another in the order in which that one sends.
        """

    def receive(self, microbatch: int) -> list[Tensor | None]:
        """Waits for a message that was posted. Each tensor is in memory of its own, strides and alignment kept."""


class Pending(Protocol):
    """A collective that is under way."""

    def wait(self) -> None:
        """Returns when the tensors that it was started with hold the result."""


class Transport(Protocol):
    """Moves tensors between the ranks of one pipeline; one object a rank."""

    rank: int
    ranks: int

    def connect(self, source_rank: int, target_rank: int) -> None:
        """Makes ready for messages from one rank to another, before the first of them. May wait for the other rank.

        Both of the two call it, each of them in the same order of pairs as all other ranks.
        """

    def channel(self, program: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Channel:
        """The channel of a link within one program. Each of its two ranks asks for it once."""

    def reduce(self, group: int, holders: Sequence[int], tensors: Sequence[Tensor]) -> Pending:
        """Starts to sum each tensor, in place, over the ranks `holders`: the same bits on each of them.

        Every holder gives tensors of the same shapes, and starts its reductions in ascending order of `group`.
        """

    def share(self, value: Tensor, source_rank: int) -> Pending:
        """Starts to copy a small float64 tensor on the CPU, in place, from one rank to all. Never blocks."""

    def release(self, program: int) -> None:
        """Gives back what the channels of a program hold. Both ends call it between the same two steps, and use these
        channels no more.
        """

    def end_step(self) -> None:
        """Ends a program's step: the layouts that its first step saw hold from now on."""

    def drop_step(self) -> None:
        """Forgets what a step that raised has left, if there can be another one after it."""

    def close(self) -> None:
        """Waits for what is under way and gives everything back."""
