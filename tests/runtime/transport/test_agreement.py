"""What the ends of a channel agree on in the first step, what of it may differ in later ones, and that receives start
in the order in which they were posted."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock._base.errors import ShapeError
from penstock._base.stages import Link
from penstock.runtime.transport.agreement import Agreement, is_channels_last
from penstock.runtime.transport.distributed import ReceiveOrder


def agreed(*first: Tensor) -> Agreement:
    agreement = Agreement(Link(1, 0, tuple((0, f"value_{index}") for index in range(len(first)))))
    agreement.check(0, first)
    assert agreement.end_step()
    return agreement


def test_the_stride_of_a_single_row_says_nothing() -> None:
    """A slice of two rows' concatenation has another than a tensor of its own."""
    agreement = agreed(torch.zeros(1, 4))
    (layout,) = agreement.check(0, (torch.zeros(1, 8)[:, :4],))
    assert layout is not None
    assert layout.stride == (4, 1), "what was agreed on, for which the other end has memory"


@pytest.mark.parametrize(
    "other", [torch.zeros(2, 8)[:, :4], torch.zeros(4, 2).t(), torch.zeros(2, 5), torch.zeros(2, 4).double(), None]
)
def test_all_else_must_be_the_same(other: Tensor | None) -> None:
    agreement = agreed(torch.zeros(1, 4), torch.zeros(2, 4))
    with pytest.raises(ShapeError, match="'value_1' of stage 0"):
        agreement.check(0, (torch.zeros(1, 8)[:, :4], other))


def test_a_link_that_varies_learns_in_every_step() -> None:
    agreement = Agreement(Link(1, 0, ((0, "value_0"),), varies=True))
    for rows in (1, 2):
        (layout,) = agreement.check(0, (torch.zeros(rows, 4),))
        assert layout is not None
        assert layout.shape == (rows, 4)
        assert not agreement.end_step()
        assert agreement.learning


@pytest.mark.parametrize(
    "shape", [(2, 3, 1, 1), (2, 1, 5, 5), (2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 1, 1, 1), (2, 1, 4, 4, 4)]
)
def test_the_memory_format_is_the_one_that_torch_chooses_kernels_by(shape: tuple[int, ...]) -> None:
    last = torch.channels_last if len(shape) == 4 else torch.channels_last_3d
    strides = [torch.empty(shape).stride(), torch.empty(shape).to(memory_format=last).stride()]
    strides += [torch.empty(2, *shape).to(memory_format=torch.contiguous_format)[0].stride(), (1,) * len(shape)]
    channels = shape[1]
    images = (channels, 1, *(channels,) * (len(shape) - 2))
    for stride in (*strides, images):
        padded = torch.nn.functional.pad(torch.empty_strided(shape, stride), (0, 1))  # of the format of its input
        assert is_channels_last(shape, stride) == (padded.stride(1) == 1), (shape, stride)


@pytest.mark.parametrize("shape", [(4, 64, 1, 1), (4, 1, 9, 9)])
def test_strides_that_make_another_memory_format_are_not_ignored(shape: tuple[int, ...]) -> None:
    first = torch.zeros(shape)
    last = torch.empty_strided(shape, (shape[1] * shape[2] * shape[3], 1, shape[3] * shape[1], shape[1]))
    assert is_channels_last(shape, last.stride())
    assert not is_channels_last(shape, first.stride())
    with pytest.raises(ShapeError, match="'value_0' of stage 0"):
        agreed(first).check(0, (last,))


# -- in which order receives start -------------------------------------------------------------------------------------


Started = list[tuple[str, int]]


class Receiver:
    def __init__(self, name: str, started: Started, known: bool = True) -> None:
        self.name, self.can_start = name, known
        self._started = started

    def has_started(self, microbatch: int) -> bool:
        return (self.name, microbatch) in self._started

    def start(self, microbatch: int) -> None:
        self._started.append((self.name, microbatch))


def test_what_would_wait_holds_up_what_was_posted_behind_it() -> None:
    """Back ends without tags match messages by their order."""
    started: Started = []
    way: ReceiveOrder = ReceiveOrder()
    learning, known = Receiver("learning", started, known=False), Receiver("known", started)
    way.post(known, 0)
    assert started == [("known", 0)]
    way.post(learning, 0)
    way.post(known, 1)
    way.post(learning, 1)
    assert started == [("known", 0)], "to post never waits"
    way.start_until(known, 1)
    assert started == [("known", 0), ("learning", 0), ("known", 1)], "no more than it must"
    way.start_until(learning, 1)
    assert started[-1] == ("learning", 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_the_order_is_that_of_posts(posts: list[tuple[bool, bool]]) -> None:
    started: Started = []
    receivers = Receiver("learning", started, known=False), Receiver("known", started)
    way: ReceiveOrder = ReceiveOrder()
    expected = []
    for microbatch, (which, used_at_once) in enumerate(posts):
        expected.append((receivers[which].name, microbatch))
        way.post(receivers[which], microbatch)
        if used_at_once:
            way.start_until(receivers[which], microbatch)
            assert started == expected
    assert started == expected[: len(started)]
