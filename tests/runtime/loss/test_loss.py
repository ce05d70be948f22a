"""Weights that make microbatches' losses the loss of the batch, and what follows the last stage."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.runtime.loss.loss import model_loss, weights


@given(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4))
def test_the_mean_over_replicas_is_the_loss_of_the_whole_batch(sizes: list[list[int]]) -> None:
    """Also where they hold other numbers of rows: with a row's loss for each row, a mean and a sum over all rows."""
    replicas = len(sizes)
    losses = [[float(r + 2 * k) for k in range(len(mine))] for r, mine in enumerate(sizes)]
    rows = [
        (loss, size) for mine, some in zip(losses, sizes, strict=True) for loss, size in zip(mine, some, strict=True)
    ]

    def total(reduction: Literal["mean", "sum"]) -> float:
        found = [weights(reduction, mine, [], replicas, lambda own: sum(map(sum, sizes)) / replicas) for mine in sizes]
        pairs = (zip(mine, some, strict=True) for mine, some in zip(losses, found, strict=True))
        return sum(loss * weight for pair in pairs for loss, weight in pair) / replicas

    assert math.isclose(total("mean"), sum(loss * size for loss, size in rows) / sum(size for _, size in rows))
    assert math.isclose(total("sum"), sum(loss for loss, _ in rows))


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_weights_that_are_none(values: list[float]) -> None:
    with pytest.raises(ArgumentError, match=r"reduction: the weights .*expected non-negative"):
        weights(lambda target: values[int(target)], [1, 1], [0, 1])


SCALAR = torch.tensor(1.5)


@pytest.mark.parametrize(
    ("output", "found"),
    [
        (SimpleNamespace(loss=SCALAR), True),
        ({"loss": SCALAR, "logits": torch.zeros(2)}, True),
        (SCALAR, True),
        (torch.zeros(2), False),
        (torch.tensor(3), False),
        ({"logits": SCALAR}, False),
        (SimpleNamespace(loss=None), False),
        ((SCALAR,), False),
    ],
)
def test_own_loss(output: Any, found: bool) -> None:
    assert (model_loss(output) is SCALAR) == found
