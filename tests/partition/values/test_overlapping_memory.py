"""Where tensors lie, and whether two of them overlap: against the elements themselves."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from penstock.partition.values.memory import extent, overlap

MEMORY = torch.arange(60)


@st.composite
def views(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    stride = [draw(st.integers(0, 8)) for _ in shape]
    room = MEMORY.numel() - extent(shape, stride)
    offset = draw(st.integers(0, max(room, 0)))
    return MEMORY.as_strided(shape, stride, offset) if room >= 0 else MEMORY


@given(views(), views())
def test_two_overlap_if_they_have_an_element_in_common(one: Tensor, other: Tensor) -> None:
    assert overlap(one, other) == bool({*one.flatten().tolist()} & {*other.flatten().tolist()})
    halves = other.view(torch.int32) if other.dim() and other.stride(-1) == 1 else other  # of another type
    assert overlap(one, halves) == overlap(other, one)


def test_tensors_without_strides_are_whole() -> None:
    sparse = torch.eye(3).to_sparse()
    assert overlap(sparse, sparse)
    assert not overlap(sparse, torch.eye(3).to_sparse())
