"""Slots of shared memory, both ends in one process: what is put in comes out, whatever the order and the shapes."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.agreement import Agreement
from penstock.runtime.transport.shared_memory import SLOTS, Neighbors, _SlotRing

pytestmark = pytest.mark.skipif(not Neighbors.supported(), reason="this system has no such shared memory")

LINK = Link(0, 1, ((0, "a"), (0, "b")))


def message(microbatch: int) -> list[Tensor | None]:
    """Of other shapes and strides in each microbatch; the second value is sometimes absent."""
    generator = torch.Generator().manual_seed(microbatch)
    first = torch.randn(microbatch + 1, 5, generator=generator)
    return [first.t().contiguous().t() if microbatch % 2 else first, None if microbatch == 2 else first.half()]


@pytest.fixture
def ends() -> Iterator[tuple[_SlotRing, _SlotRing]]:
    """The sender's and the receiver's, which have agreed on the layouts of six messages."""
    agreement = Agreement(LINK)
    for k in range(6):
        agreement.learn(k, [None if tensor is None else Layout.of(tensor) for tensor in message(k)])
    size = max(map(_SlotRing.slot_bytes, agreement.all()))
    memory = os.memfd_create("test")
    os.ftruncate(memory, size * SLOTS)
    mine, theirs = socket.socketpair()
    lanes = _SlotRing(os.dup(memory), mine, size, agreement), _SlotRing(memory, theirs, size, agreement)
    yield lanes
    for lane in lanes:
        lane.close()


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert torch.equal(mine, other)
            assert mine.stride() == other.stride()
            assert mine.dtype == other.dtype


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_messages_may_be_taken_in_another_order_than_they_came(
    ends: tuple[_SlotRing, _SlotRing], order: tuple[int, int]
) -> None:
    sender, receiver = ends
    for turn in (0, 2, 4):
        for k in (turn, turn + 1):
            sender.put(k, message(k))
        for k in order:
            assert_same(receiver.take(turn + k), message(turn + k))


def test_a_sender_waits_until_a_slot_is_free(ends: tuple[_SlotRing, _SlotRing]) -> None:
    """A message that was not taken yet is never written over."""
    sender, receiver = ends
    sent: list[int] = []

    def send() -> None:
        for k in range(6):
            sender.put(k, message(k))
            sent.append(k)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.2)
    assert len(sent) == SLOTS
    for k in range(6):
        assert_same(receiver.take(k), message(k))
    thread.join(10)
    assert sent == list(range(6))
