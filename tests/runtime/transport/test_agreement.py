"""What the ends of a channel agree on in the first step, and what of it may differ in later ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock._base.errors import ShapeError
from penstock._base.stages import Link
from penstock.runtime.transport.agreement import Agreement, is_channels_last


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
