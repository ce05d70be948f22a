"""Batches are cut into rows that differ by one at most, each microbatch in memory of its own."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from penstock._base.errors import ArgumentError
from penstock._base.pytree import flatten
from penstock.runtime.batch.cut import Cutting, Microbatch, cut_along_dims, cut_by_sizes, input_signature
from penstock.runtime.batch.example import rotate
from penstock.runtime.batch.outline import Outline
from penstock.runtime.exact.rules import CACHE_LINE_BYTES


def batches() -> dict[str, torch.Tensor]:
    image = torch.randn(7, 3, 5, 5)
    return {
        "contiguous": image,
        "channels last": image.to(memory_format=torch.channels_last),
        "transposed": torch.randn(9, 7).t(),
        "with gaps": torch.randn(7, 9)[:, 1:],
        "expanded": torch.randn(7, 1).expand(7, 4),
        "expanded rows": torch.randn(1, 4).expand(7, 4),
        "windows": torch.randn(20).as_strided((7, 4), (2, 1)),
        "empty": torch.randn(7, 0),
        "bool": torch.randn(7, 3) > 0,
    }


@pytest.mark.parametrize("name", batches())
def test_each_microbatch_has_memory_of_its_own_with_the_strides_of_the_batch(name: str) -> None:
    batch = batches()[name]
    original = batch.clone()
    parts = cut_by_sizes(batch, (3, 2, 2), "batch")
    addresses = set()
    for part, expected in zip(parts, torch.split(original, [3, 2, 2]), strict=True):
        assert torch.equal(part, expected)
        if name != "windows":  # whose elements share addresses: nothing can be copied into such a tensor
            assert part.stride() == batch.stride()
        assert part.data_ptr() % CACHE_LINE_BYTES == 0
        assert not part._is_view()
        addresses.add(part.untyped_storage().data_ptr())
    if batch.numel():
        assert batch.untyped_storage().data_ptr() not in addresses
        assert len(addresses) == 3
    assert torch.equal(batch, original)


def test_plain_values_of_other_types_or_values_are_kinds_of_their_own() -> None:
    beside = [1, 1.0, True, 2, None, "1"]
    signatures = [input_signature(flatten((torch.zeros(4, 6), value))) for value in beside]
    assert len(set(signatures)) == len(beside)
    assert input_signature(flatten((torch.ones(4, 6), 1))) == signatures[0]


# -- what travels to other ranks of a batch of a new kind: its shape, and the values of integers alone -----------------


def test_floats_travel_without_their_data_and_integers_with_it() -> None:
    image = torch.randn(5, 64, 32, 32).to(memory_format=torch.channels_last)
    mask = torch.tensor([1, 0, 1, 1, 0])
    given = cut_along_dims(((image,), {"mask": mask, "flag": True, "text": "word"}), 2, "input")
    sent = pickle.dumps(Outline.of(given))
    assert len(sent) < 10_000
    outline = pickle.loads(sent)
    assert outline.sizes == (3, 2)
    assert outline.text.startswith("args[0] [3, 64, 32, 32]")
    for (args, kwargs), rows in zip(outline.fill(), (slice(0, 3), slice(3, 5)), strict=True):
        assert (args[0].shape, args[0].stride(), args[0].dtype) == (image[rows].shape, image.stride(), image.dtype)
        assert args[0].device == image.device
        assert torch.equal(kwargs.pop("mask"), mask[rows])
        assert kwargs == {"flag": True, "text": "word"}


def test_what_cannot_travel_is_refused_by_name() -> None:
    given = cut_along_dims(((torch.zeros(2, 3),), {"function": lambda x: x}), 2, "input")
    with pytest.raises(ArgumentError, match=r"input kwargs\['function'\] is a function that cannot be pickled"):
        pickle.dumps(Outline.of(given))


@pytest.mark.parametrize(("microbatches", "order"), [(1, [2, 3, 0, 1]), (2, [2, 3, 0, 1]), (4, [3, 0, 1, 2])])
def test_all_that_is_cut_along_the_batch_moves_together(microbatches: int, order: list[int]) -> None:
    x = torch.arange(4.0).reshape(4, 1)
    kwargs = {"names": ["a", "b", "c", "d"], "pair": ("a", "b", "c", "d"), "ids": np.arange(4), "size": [7, 8]}
    found = rotate(Cutting.of(None), Microbatch((x,), kwargs, ["p", "q", "r", "s"]), microbatches)
    assert torch.equal(found.args[0], x[order])
    assert found.kwargs["names"] == ["abcd"[row] for row in order]
    assert found.kwargs["pair"] == tuple("abcd"[row] for row in order)
    assert found.kwargs["ids"].tolist() == order
    assert found.kwargs["size"] == [7, 8]
    assert found.target == ["pqrs"[row] for row in order]
