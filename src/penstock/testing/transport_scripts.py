"""What every transport must do, as scripts: steps of two ranks in an order that respects their dependencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ShapeError
from penstock._base.stages import Link
from penstock.runtime.transport.protocol import Channel
from penstock.testing.transport_steps import (
    LINK,
    Rank,
    Step,
    both,
    close,
    drop_step,
    end_step,
    equal,
    looks_like,
    message,
    post,
    same,
    send,
    take,
)

MICROBATCHES = 3

Script = Callable[[], Iterator[Step]]


def ranks_connect_before_they_talk() -> Iterator[Step]:
    for source in (0, 1):
        yield from both(lambda rank, source=source: rank.transport.connect(source, 1 - source))  # type: ignore[misc]


def values_keep_bits_strides_and_alignment() -> Iterator[Step]:
    for step in range(3):
        for k in range(MICROBATCHES):
            yield 0, partial(send, k=k, tensors=message(step, k))
            yield 1, partial(post, k=k)
            yield 1, partial(take, k=k, expected=message(step, k))
        yield from both(end_step)


def sends_run_ahead_of_receives() -> Iterator[Step]:
    """As in GPipe's forwards: in the first step no send may wait for a receive; later, two sends may run ahead."""
    for step in range(2):
        for k in range(2):
            yield 0, partial(send, k=k, tensors=message(step, k))
        for k in range(2):
            yield 1, partial(post, k=k)

        def receive(rank: Rank, step: int = step) -> None:
            messages = [rank.channel().receive(k) for k in range(2)]
            for k, tensors in enumerate(messages):  # the first is kept for its backward while the second arrives
                for got, expected in zip(tensors, message(step, k), strict=True):
                    same(got, expected)

        yield 1, receive
        yield from both(end_step)


def absent_tensors_arrive_as_none() -> Iterator[Step]:
    def without(step: int, k: int) -> list[Tensor | None]:
        return [None if index == k else tensor for index, tensor in enumerate(message(step, k))]

    for step in range(2):
        for k in range(2):
            yield 1, partial(send, k=k, tensors=without(step, k), backward=True)
            yield 0, partial(post, k=k, backward=True)
            yield 0, partial(take, k=k, expected=without(step, k), backward=True)
        yield from both(end_step)


def what_arrives_is_memory_of_its_own() -> Iterator[Step]:
    def send(rank: Rank) -> None:
        rank.tensors = message(0, 0)
        rank.channel().send(0, rank.tensors)

    def receive(rank: Rank) -> None:
        rank.channel().post(0)
        for tensor in rank.channel().receive(0):
            assert tensor is not None
            tensor.add_(1)

    def look(rank: Rank) -> None:
        for mine, expected in zip(rank.tensors, message(0, 0), strict=True):
            assert torch.equal(mine, expected), "an update of what arrived changed what was sent"

    yield 0, send
    yield 1, receive
    yield 0, look
    yield from both(end_step)


def another_layout_is_refused_by_the_sender() -> Iterator[Step]:
    def send_others(rank: Rank) -> None:
        image, row = message(1, 0)
        for wrong in ([image, row.double()], [image.contiguous(), row], [image[:1], row], [image, None]):
            text = ""
            try:
                rank.channel().send(0, wrong)
            except ShapeError as error:
                text = str(error)
            assert text, "a tensor of another layout was sent"
            assert "'a'" in text or "'b'" in text, f"the error does not name the value: {text}"

    for step in range(2):
        if step:
            yield 0, send_others
        yield 0, partial(send, k=0, tensors=message(step, 0))
        yield 1, partial(post, k=0)
        yield 1, partial(take, k=0, expected=message(step, 0))
        yield from both(end_step)


def a_released_program_makes_room_for_another() -> Iterator[Step]:
    """As for batches of a new shape: another program, with another layout, over the same link."""

    def release(rank: Rank) -> None:
        rank.transport.release(rank.program)
        rank.program += 1000  # which no other script has
        rank.channels.clear()

    for turn in range(3):
        for step in range(2):
            sent, expected = ([tensor[: turn + 1] for tensor in message(step, 0)] for _ in range(2))
            yield 0, partial(send, k=0, tensors=sent)
            yield 1, partial(post, k=0)
            yield 1, partial(take, k=0, expected=expected, same=equal)
            yield from both(end_step)
        yield from both(release)


def a_loss_reaches_every_rank() -> Iterator[Step]:
    for step in range(3):
        for r in (0, 1):

            def start(rank: Rank, r: int = r, step: int = step) -> None:
                buffer = torch.tensor([1.5 + step, 0.0] if r == 1 else [0.0, 7.0], dtype=torch.float64)
                rank.tensors = [buffer]
                rank.pending = [rank.transport.broadcast(buffer, 1)]

            yield r, start
        for r in (0, 1):

            def read(rank: Rank, step: int = step) -> None:
                rank.pending[0].wait()
                assert rank.tensors[0].tolist() == [1.5 + step, 0.0], "the shared value is not the source's"

            yield r, read


def values_of_several_ranks_cross_each_other() -> Iterator[Step]:
    """One rank's announcements and the other's losses; some are never read, some are read late."""
    for turn in range(6):
        for source, r in ((0, 0), (0, 1), (1, 0), (1, 1)):

            def start(rank: Rank, source: int = source, r: int = r, turn: int = turn) -> None:
                if source == 0:
                    rank.tensors, rank.pending = [], []
                values = [10.0 * turn + source, 2.0, 3.0] if r == source else [0.0] * 3
                rank.tensors.append(torch.tensor(values, dtype=torch.float64))
                rank.pending.append(rank.transport.broadcast(rank.tensors[-1], source))

            yield r, start
        for r in (0, 1) if turn % 2 else ():

            def read(rank: Rank, turn: int = turn) -> None:
                for source in (1, 0):
                    rank.pending[source].wait()
                    assert rank.tensors[source].tolist() == [10.0 * turn + source, 2.0, 3.0], "not the source's value"

            yield r, read


def directions_of_a_link_do_not_mix() -> Iterator[Step]:
    """Values down a link and their gradients up it, with the same numbers and layouts, under way at the same time."""
    for step in range(3):
        for k in range(2):
            yield 0, partial(send, k=k, tensors=message(step, k))
            yield 1, partial(send, k=k, tensors=message(step, k + 2), backward=True)
        for rank, backward in ((0, True), (1, False)):
            for k in range(2):
                yield rank, partial(post, k=k, backward=backward)
            for k in range(2):
                yield rank, partial(take, k=k, expected=message(step, k + 2 * backward), backward=backward)
        yield from both(end_step)


def links_of_two_ranks_do_not_mix() -> Iterator[Step]:
    """Messages over two links with the same layouts, received in a different order from that of sends and posts."""
    other = Link(0, 3, LINK.values)

    def channel(rank: Rank, link: Link) -> Channel:
        if link == LINK:
            return rank.channel()
        if True not in rank.channels:
            rank.channels[True] = rank.transport.channel(rank.program, link, 0, 1, backward=False)
        return rank.channels[True]

    def number(step: int, link: Link, k: int) -> int:
        return 4 * step + 2 * (link == other) + k

    for step in range(3):

        def send(rank: Rank, step: int = step) -> None:
            for k in range(2):
                for link in (LINK, other):
                    channel(rank, link).send(k, message(0, number(step, link, k)))

        def receive(rank: Rank, step: int = step) -> None:
            for k in range(2):
                for link in (LINK, other):
                    channel(rank, link).post(k)
            for link in (other, LINK):
                for k in (1, 0):
                    same(channel(rank, link).receive(k)[0], message(0, number(step, link, k))[0])

        yield 0, send
        yield 1, receive
        yield from both(end_step)


def every_dtype_travels() -> Iterator[Step]:
    """Including those for which some back ends have no type."""
    pairs = (
        (torch.int16, torch.uint16),
        (torch.bool, torch.uint32),
        (torch.complex64, torch.bfloat16),
        (torch.float8_e4m3fn, torch.uint64),
    )
    yield from _each_travels(lambda: [[torch.arange(5).to(dtype) for dtype in pair] for pair in pairs], equal, steps=2)


def every_shape_travels() -> Iterator[Step]:
    """Scalars, empty tensors, and tensors whose elements share memory."""

    def pairs() -> list[list[Tensor]]:
        return [
            [torch.tensor(1.5), torch.tensor(7)],
            [torch.empty(0), torch.empty(2, 0, 3)],
            [torch.arange(3.0).unsqueeze(1).expand(3, 4), torch.tensor(2.0).expand(5)],
        ]

    yield from _each_travels(pairs, looks_like, steps=3)


def _each_travels(
    make: Callable[[], list[list[Tensor]]], same: Callable[[Any, Any], object], *, steps: int
) -> Iterator[Step]:
    for _ in range(steps):
        for k, (sent, expected) in enumerate(zip(make(), make(), strict=True)):
            yield 0, partial(send, k=k, tensors=sent)
            yield 1, partial(post, k=k)
            yield 1, partial(take, k=k, expected=expected, same=same)
        yield from both(end_step)


def sums_have_the_same_bits_everywhere() -> Iterator[Step]:
    """Even if a second sum starts before the first is waited for."""
    for _ in range(2):
        for group in (0, 1):
            for r in (0, 1):

                def start(rank: Rank, r: int = r, group: int = group) -> None:
                    if group == 0:
                        rank.tensors, rank.pending = [], []
                    tensors = [tensor + r for tensor in message(group, 0)]
                    rank.tensors += tensors
                    rank.pending.append(rank.transport.reduce(group, (0, 1), tensors))

                yield r, start
        for r in (0, 1):

            def read(rank: Rank) -> None:
                for pending in rank.pending:
                    pending.wait()
                terms = [tensor for group in (0, 1) for tensor in message(group, 0)]
                for got, term in zip(rank.tensors, terms, strict=True):
                    assert torch.equal(got, term + (term + 1)), "a sum is not that of both ranks' terms"

            yield r, read


def a_dropped_step_leaves_nothing() -> Iterator[Step]:
    """A first step that raises after one message of two has been taken: the next may have other layouts."""

    def first_rows(turn: int, k: int) -> list[Tensor]:
        return [tensor[:1] for tensor in message(turn, k)]

    for k in range(2):
        yield 0, partial(send, k=k, tensors=message(0, k))
        yield 1, partial(post, k=k)
    yield 1, partial(take, k=0, expected=message(0, 0))
    yield from both(drop_step)
    yield from both(end_step)  # of another kind of batch, which uses no channel of this one
    for turn in range(1, 4):
        for k in range(2):
            yield 0, partial(send, k=k, tensors=first_rows(turn, k))
            yield 1, partial(post, k=k)
        if turn == 2:  # also a later step leaves nothing
            yield from both(drop_step)
            continue
        for k in range(2):
            yield 1, partial(take, k=k, expected=first_rows(turn, k), same=equal)
        yield from both(end_step)


def a_dropped_step_leaves_no_sums() -> Iterator[Step]:
    """Nor broadcasts, if one rank began some before the step raised."""

    def begin(rank: Rank) -> None:
        rank.transport.reduce(0, (0, 1), message(9, 0))
        rank.transport.broadcast(torch.ones(2, dtype=torch.float64), 0)

    yield 0, begin
    yield from both(drop_step)
    yield from sums_have_the_same_bits_everywhere()
    yield from a_loss_reaches_every_rank()


def what_was_sent_arrives_after_close() -> Iterator[Step]:
    """A rank that has sent all its messages may close before the other takes them. Nothing can follow."""
    yield 1, partial(send, k=0, tensors=message(0, 0), backward=True)
    yield 0, partial(post, k=0, backward=True)
    yield 0, partial(take, k=0, expected=message(0, 0), backward=True)  # so all earlier scripts have ended
    for turn in range(2):
        for k in range(2):
            yield 0, partial(send, k=k, tensors=message(turn, k))
        if turn == 1:
            yield 0, end_step
            yield 0, close
        for k in range(2):
            yield 1, partial(post, k=k)
        for k in range(2):
            yield 1, partial(take, k=k, expected=message(turn, k))
        yield 1, end_step
        if turn == 0:
            yield 0, end_step
    yield 1, close


POINT_TO_POINT_SCRIPTS: tuple[Script, ...] = (
    ranks_connect_before_they_talk,
    values_keep_bits_strides_and_alignment,
    sends_run_ahead_of_receives,
    absent_tensors_arrive_as_none,
    what_arrives_is_memory_of_its_own,
    another_layout_is_refused_by_the_sender,
    a_released_program_makes_room_for_another,
    directions_of_a_link_do_not_mix,
    links_of_two_ranks_do_not_mix,
    every_dtype_travels,
    every_shape_travels,
)
COLLECTIVE_SCRIPTS: tuple[Script, ...] = (
    a_loss_reaches_every_rank,
    values_of_several_ranks_cross_each_other,
    sums_have_the_same_bits_everywhere,
)


def scripts_for(*, collectives: bool, one_process: bool = False) -> list[Script]:
    """The scripts for transports with or without collectives. `one_process`: one process drives both ranks, so that
    after a step that raised another may follow."""
    found = [*POINT_TO_POINT_SCRIPTS, *(COLLECTIVE_SCRIPTS if collectives else ())]
    if one_process:
        found += [a_dropped_step_leaves_nothing, *([a_dropped_step_leaves_no_sums] if collectives else [])]
    return [*found, what_was_sent_arrives_after_close]
