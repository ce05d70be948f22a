"""The batch that a verification takes second: the same samples in another order."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from penstock.runtime.batch.cutting import Cutting, Microbatch


@pytest.mark.parametrize(("microbatches", "order"), [(1, [2, 3, 0, 1]), (2, [2, 3, 0, 1]), (4, [3, 0, 1, 2])])
def test_all_that_is_cut_along_the_batch_moves_together(microbatches: int, order: list[int]) -> None:
    x = torch.arange(4.0).reshape(4, 1)
    kwargs = {"names": ["a", "b", "c", "d"], "pair": ("a", "b", "c", "d"), "ids": np.arange(4), "size": [7, 8]}
    found = Cutting.of(None).rotated(Microbatch((x,), kwargs, ["p", "q", "r", "s"]), microbatches)
    assert torch.equal(found.args[0], x[order])
    assert found.kwargs["names"] == ["abcd"[row] for row in order]
    assert found.kwargs["pair"] == tuple("abcd"[row] for row in order)
    assert found.kwargs["ids"].tolist() == order
    assert found.kwargs["size"] == [7, 8]
    assert found.target == ["pqrs"[row] for row in order]
