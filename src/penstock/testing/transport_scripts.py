"""Scripts that check a transport: steps of two ranks in an order that respects their dependencies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ShapeError
from penstock._base.stages import Link
from penstock.runtime.exact.rules import Layout, copy_as
from penstock.runtime.transport.protocol import Channel, Message, Pending, Transport

MICROBATCHES = 3
LINK = Link(0, 1, ((0, "a"), (0, "b")))
CPU = torch.device("cpu")


# -- steps ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Rank:
    """A rank's transport, and values that a script's steps keep for later ones. Scripts make and check tensors on the
    CPU; those that the transport sends and receives are on `device`."""

    transport: Transport
    number: int
    device: torch.device
    channels: dict[tuple[Link, bool], Channel] = field(default_factory=dict)
    pending: list[Pending] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)

    def channel(self, link: Link = LINK, *, backward: bool = False) -> Channel:
        if (link, backward) not in self.channels:
            ends = int(backward), 1 - int(backward)
            self.channels[link, backward] = self.transport.channel(self.number, link, *ends, backward=backward)
        return self.channels[link, backward]

    def send(self, k: int, message: Message, *, backward: bool = False, link: Link = LINK) -> None:
        self.channel(link, backward=backward).send(k, move_to(message, self.device))

    def post(self, k: int, *, backward: bool = False, link: Link = LINK) -> None:
        self.channel(link, backward=backward).post(k)

    def receive(self, k: int, *, backward: bool = False, link: Link = LINK) -> list[Tensor | None]:
        received = self.channel(link, backward=backward).receive(k)
        for tensor in received:
            assert tensor is None or tensor.device.type == self.device.type, f"a tensor arrived on {tensor.device}"
        return move_to(received, CPU)

    def take(self, k: int, expected: Message, *, compare: Compare, **options: Any) -> None:
        for pair in zip(self.receive(k, **options), expected, strict=True):
            compare(*pair)

    def end_step(self) -> None:
        self.transport.end_step()

    def drop_step(self) -> None:
        self.transport.drop_step()
        self.pending.clear()
        self.tensors.clear()

    def close(self) -> None:
        self.transport.close()


Step = tuple[int, Callable[[Rank], None]]
Script = Callable[[], Iterator[Step]]
Compare = Callable[[Any, Any], object]


def move_to(message: Message, device: torch.device) -> list[Tensor | None]:
    """Copy a message to a device, with the same strides and alignment."""
    return [t if t is None or t.device.type == device.type else copy_as(Layout.of(t), t, device) for t in message]


def on_both_ranks(step: Callable[[Rank], None]) -> Iterator[Step]:
    yield 0, step
    yield 1, step


def message(step: int, microbatch: int) -> list[Tensor]:
    """Return two tensors that either rank can make: one channels-last, one that does not start on a cache line."""
    generator = torch.Generator().manual_seed(100 * step + microbatch)
    image = torch.randn(2, 3, 4, 5, generator=generator).to(memory_format=torch.channels_last)
    return [image, torch.randn(8, generator=generator)[1:]]


def check_memory(received: Tensor | None, expected: Tensor | None) -> None:
    if expected is None:
        assert received is None, "a tensor arrived where None was sent"
        return
    tensor = check_layout(received, expected)
    assert tensor.data_ptr() % 64 == expected.data_ptr() % 64, "the address modulo a cache line changed"


def check_layout(received: Tensor | None, expected: Tensor) -> Tensor:
    tensor = check_values(received, expected)
    assert tensor.stride() == expected.stride(), f"strides {expected.stride()} became {tensor.stride()}"
    return tensor


def check_values(received: Tensor | None, expected: Tensor) -> Tensor:
    """Compare values byte by byte, since torch cannot compare some types."""
    assert received is not None, "a tensor did not arrive"
    assert received.shape == expected.shape, f"shape {tuple(expected.shape)} became {tuple(received.shape)}"
    assert received.dtype == expected.dtype, f"{expected.dtype} became {received.dtype}"
    received_bytes, expected_bytes = (t.reshape(-1).contiguous().view(torch.uint8) for t in (received, expected))
    assert torch.equal(received_bytes, expected_bytes), f"a tensor arrived with other values ({expected.dtype})"
    return received


def send_all(messages: Sequence[Message], *, backward: bool = False) -> Iterator[Step]:
    """Send these messages from rank 0, or backward from rank 1."""
    for k, tensors in enumerate(messages):
        yield int(backward), partial(Rank.send, k=k, message=tensors, backward=backward)


def take_all(
    messages: Sequence[Message], num_posted: int = 2, *, backward: bool = False, compare: Compare = check_memory
) -> Iterator[Step]:
    """Take these messages on the receiving rank, which first posts `num_posted` receives."""
    for k in range(num_posted):
        yield 1 - int(backward), partial(Rank.post, k=k, backward=backward)
    for k, tensors in enumerate(messages):
        yield 1 - int(backward), partial(Rank.take, k=k, expected=tensors, backward=backward, compare=compare)


def send_and_take(
    make_messages: Callable[[], Sequence[Message]], *, backward: bool = False, compare: Compare = check_memory
) -> Iterator[Step]:
    """Send each message after the one before was taken."""
    source, target = int(backward), 1 - int(backward)
    for k, (tensors, expected) in enumerate(zip(make_messages(), make_messages(), strict=True)):
        yield source, partial(Rank.send, k=k, message=tensors, backward=backward)
        yield target, partial(Rank.post, k=k, backward=backward)
        yield target, partial(Rank.take, k=k, expected=expected, backward=backward, compare=compare)


# -- messages ---------------------------------------------------------------------------------------------------------


def ranks_connect_before_they_talk() -> Iterator[Step]:
    for source in (0, 1):
        yield from on_both_ranks(lambda rank, source=source: rank.transport.connect(source, 1 - source))  # type: ignore[misc]


def values_keep_bits_strides_and_alignment() -> Iterator[Step]:
    for step in range(3):
        yield from send_and_take(lambda step=step: [message(step, k) for k in range(MICROBATCHES)])  # type: ignore[misc]
        yield from on_both_ranks(Rank.end_step)


def sends_run_ahead_of_receives() -> Iterator[Step]:
    """Send ahead, as in GPipe's forwards: in the first step no send may wait for a receive; later, two sends may run
    ahead."""
    for step in range(2):
        yield from send_all([message(step, k) for k in range(2)])
        yield from take_all([])

        def receive(rank: Rank, step: int = step) -> None:
            messages = [rank.receive(k) for k in range(2)]
            for k, tensors in enumerate(messages):  # the first is kept for its backward while the second arrives
                for received, expected in zip(tensors, message(step, k), strict=True):
                    check_memory(received, expected)

        yield 1, receive
        yield from on_both_ranks(Rank.end_step)


def absent_tensors_arrive_as_none() -> Iterator[Step]:
    def messages(step: int) -> list[Message]:
        return [[None if i == k else tensor for i, tensor in enumerate(message(step, k))] for k in range(2)]

    for step in range(2):
        yield from send_and_take(partial(messages, step), backward=True)
        yield from on_both_ranks(Rank.end_step)


def what_arrives_is_memory_of_its_own() -> Iterator[Step]:
    def send(rank: Rank) -> None:
        rank.tensors = message(0, 0)
        rank.send(0, rank.tensors)

    def receive(rank: Rank) -> None:
        rank.post(0)
        for tensor in rank.receive(0):
            assert tensor is not None
            tensor.add_(1)

    def check(rank: Rank) -> None:
        for sent, expected in zip(rank.tensors, message(0, 0), strict=True):
            assert torch.equal(sent, expected), "an update of what arrived changed what was sent"

    yield 0, send
    yield 1, receive
    yield 0, check
    yield from on_both_ranks(Rank.end_step)


def another_layout_is_refused_by_the_sender() -> Iterator[Step]:
    def send_wrong_layouts(rank: Rank) -> None:
        image, row = message(1, 0)
        for wrong in ([image, row.double()], [image.contiguous(), row], [image[:1], row], [image, None]):
            error_text = ""
            try:
                rank.send(0, wrong)
            except ShapeError as error:
                error_text = str(error)
            assert error_text, "a tensor of another layout was sent"
            assert "'a'" in error_text or "'b'" in error_text, f"the error does not name the value: {error_text}"

    for step in range(2):
        if step:
            yield 0, send_wrong_layouts
        yield from send_and_take(lambda step=step: [message(step, 0)])  # type: ignore[misc]
        yield from on_both_ranks(Rank.end_step)


def a_released_number_makes_room_for_another() -> Iterator[Step]:
    """Release a number, as for batches of a new shape; the next one uses the same link with another layout."""

    def release(rank: Rank) -> None:
        rank.transport.release(rank.number)
        rank.number += 1000  # unused by other scripts
        rank.channels.clear()

    for rows in (1, 2, 3):
        for step in range(2):
            yield from send_and_take(partial(_first_rows, step, 1, rows), compare=check_values)
            yield from on_both_ranks(Rank.end_step)
        yield from on_both_ranks(release)


def _first_rows(step: int, count: int, rows: int = 1) -> list[Message]:
    return [[tensor[:rows] for tensor in message(step, k)] for k in range(count)]


def directions_of_a_link_do_not_mix() -> Iterator[Step]:
    """Send values and their gradients over a link at the same time, with the same numbers and layouts."""
    for step in range(3):
        for k in range(2):
            yield 0, partial(Rank.send, k=k, message=message(step, k))
            yield 1, partial(Rank.send, k=k, message=message(step, k + 2), backward=True)
        for backward in (True, False):
            yield from take_all([message(step, k + 2 * backward) for k in range(2)], backward=backward)
        yield from on_both_ranks(Rank.end_step)


def links_of_two_ranks_do_not_mix() -> Iterator[Step]:
    """Receive messages over two links with the same layouts in another order than they were sent and posted."""
    links = LINK, Link(0, 3, LINK.values)
    for step in range(3):
        message_index = {(link, k): 4 * step + 2 * i + k for k in range(2) for i, link in enumerate(links)}
        for (link, k), index in message_index.items():
            yield 0, partial(Rank.send, k=k, message=message(0, index), link=link)
        for link, k in message_index:
            yield 1, partial(Rank.post, k=k, link=link)
        for link in reversed(links):
            for k in (1, 0):
                expected = message(0, message_index[link, k])
                yield 1, partial(Rank.take, k=k, expected=expected, link=link, compare=check_memory)
        yield from on_both_ranks(Rank.end_step)


def every_dtype_travels() -> Iterator[Step]:
    """Send every dtype, including those that some back ends lack."""
    pairs = (
        (torch.int16, torch.uint16),
        (torch.bool, torch.uint32),
        (torch.complex64, torch.bfloat16),
        (torch.float8_e4m3fn, torch.uint64),
    )
    for _ in range(2):
        yield from send_and_take(
            lambda: [[torch.arange(5).to(t) for t in pair] for pair in pairs], compare=check_values
        )
        yield from on_both_ranks(Rank.end_step)


def every_shape_travels() -> Iterator[Step]:
    """Send scalars, empty tensors, and tensors whose elements share memory."""

    def pairs() -> list[list[Tensor]]:
        return [
            [torch.tensor(1.5), torch.tensor(7)],
            [torch.empty(0), torch.empty(2, 0, 3)],
            [torch.arange(3.0).unsqueeze(1).expand(3, 4), torch.tensor(2.0).expand(5)],
        ]

    for _ in range(3):
        yield from send_and_take(pairs, compare=check_layout)
        yield from on_both_ranks(Rank.end_step)


def a_dropped_step_leaves_nothing() -> Iterator[Step]:
    """Drop a first step after one of two messages has been taken: the next may have other layouts."""
    yield from send_all([message(0, k) for k in range(2)])
    yield from take_all([message(0, 0)])
    yield from on_both_ranks(Rank.drop_step)
    yield from on_both_ranks(Rank.end_step)  # of another kind of batch, which uses no channel of this one
    for step in range(1, 4):
        dropped = step == 2  # also a later step leaves nothing
        yield from send_all(_first_rows(step, 2))
        yield from take_all([] if dropped else _first_rows(step, 2), compare=check_values)
        yield from on_both_ranks(Rank.drop_step if dropped else Rank.end_step)


def what_was_sent_arrives_after_close() -> Iterator[Step]:
    """Close a rank that has sent all its messages before the other takes them. This script must be the last."""
    yield from send_and_take(lambda: [message(0, 0)], backward=True)  # so all earlier scripts have ended
    for step in range(2):
        yield from send_all([message(step, k) for k in range(2)])
        if step == 1:
            yield 0, Rank.end_step
            yield 0, Rank.close
        yield from take_all([message(step, k) for k in range(2)])
        yield 1, Rank.end_step
        if step == 0:
            yield 0, Rank.end_step
    yield 1, Rank.close


# -- collectives ------------------------------------------------------------------------------------------------------


def values_of_several_ranks_cross_each_other() -> Iterator[Step]:
    """Exchange one rank's announcements and the other's losses; some are never read, some are read late."""
    for step in range(6):
        for source, r in ((0, 0), (0, 1), (1, 0), (1, 1)):

            def start(rank: Rank, source: int = source, r: int = r, step: int = step) -> None:
                if source == 0:
                    rank.tensors, rank.pending = [], []
                values = [10.0 * step + source, 2.0, 3.0] if r == source else [7.0] * 3
                rank.tensors.append(torch.tensor(values, dtype=torch.float64))
                rank.pending.append(rank.transport.broadcast(rank.tensors[-1], source))

            yield r, start

        def read(rank: Rank, step: int = step) -> None:
            for source in (1, 0):
                rank.pending[source].wait()
                assert rank.tensors[source].tolist() == [10.0 * step + source, 2.0, 3.0], "not the source's value"

        if step % 2:
            yield from on_both_ranks(read)


def sums_have_the_same_bits_everywhere() -> Iterator[Step]:
    """Reduce twice, the second time before the first is waited for."""

    def read(rank: Rank) -> None:
        for pending in rank.pending:
            pending.wait()
        terms = [tensor for group in (0, 1) for tensor in message(group, 0)]
        for received, term in zip(move_to(rank.tensors, CPU), terms, strict=True):
            assert received is not None
            assert torch.equal(received, term + (term + 1)), "a sum is not that of both ranks' terms"

    for _ in range(2):
        for group in (0, 1):
            for r in (0, 1):

                def start(rank: Rank, r: int = r, group: int = group) -> None:
                    if group == 0:
                        rank.tensors, rank.pending = [], []
                    tensors: Any = move_to([tensor + r for tensor in message(group, 0)], rank.device)
                    rank.tensors += tensors
                    rank.pending.append(rank.transport.reduce(group, (0, 1), tensors))

                yield r, start
        yield from on_both_ranks(read)


def a_dropped_step_leaves_no_sums() -> Iterator[Step]:
    """Drop a step in which one rank began a sum and a broadcast."""

    def begin(rank: Rank) -> None:
        tensors: Any = move_to(message(9, 0), rank.device)
        rank.transport.reduce(0, (0, 1), tensors)
        rank.transport.broadcast(torch.ones(2, dtype=torch.float64), 0)

    yield 0, begin
    yield from on_both_ranks(Rank.drop_step)
    yield from sums_have_the_same_bits_everywhere()
    yield from values_of_several_ranks_cross_each_other()


POINT_TO_POINT_SCRIPTS: tuple[Script, ...] = (
    ranks_connect_before_they_talk,
    values_keep_bits_strides_and_alignment,
    sends_run_ahead_of_receives,
    absent_tensors_arrive_as_none,
    what_arrives_is_memory_of_its_own,
    another_layout_is_refused_by_the_sender,
    a_released_number_makes_room_for_another,
    directions_of_a_link_do_not_mix,
    links_of_two_ranks_do_not_mix,
    every_dtype_travels,
    every_shape_travels,
)
COLLECTIVE_SCRIPTS: tuple[Script, ...] = (
    values_of_several_ranks_cross_each_other,
    sums_have_the_same_bits_everywhere,
)


def scripts_for(*, collectives: bool, one_process: bool = False) -> list[Script]:
    """Return the scripts for transports with or without collectives. `one_process`: one process drives both ranks, so
    that after a step that raised another may follow."""
    scripts = [*POINT_TO_POINT_SCRIPTS, *(COLLECTIVE_SCRIPTS if collectives else ())]
    if one_process:
        scripts += [a_dropped_step_leaves_nothing, *([a_dropped_step_leaves_no_sums] if collectives else [])]
    return [*scripts, what_was_sent_arrives_after_close]
