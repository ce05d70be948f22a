"""What the ends of a channel agree on in the first step, and what of it may differ in later ones."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from penstock.errors import ShapeError
from penstock.runtime.agreement import Agreement
from penstock.stages import Link


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
