"""What travels to other ranks of a batch of a new kind: its shape, and the values of integers alone."""

from __future__ import annotations

import pickle

import pytest
import torch

from penstock.errors import ArgumentError
from penstock.runtime.batch.microbatches import cut
from penstock.runtime.batch.outline import Outline


def test_floats_travel_without_their_data_and_integers_with_it() -> None:
    image = torch.randn(5, 64, 32, 32).to(memory_format=torch.channels_last)
    mask = torch.tensor([1, 0, 1, 1, 0])
    given = cut(((image,), {"mask": mask, "flag": True, "text": "word"}), 2, "input")
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
    given = cut(((torch.zeros(2, 3),), {"function": lambda x: x}), 2, "input")
    with pytest.raises(ArgumentError, match=r"input kwargs\['function'\] is a function that cannot be pickled"):
        pickle.dumps(Outline.of(given))
