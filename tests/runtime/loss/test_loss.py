"""Weights that make microbatches' losses the loss of the batch, and what follows the last stage."""

from __future__ import annotations

import math
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.runtime.exact.streams import Streams
from penstock.runtime.loss.loss import LossHead, own_loss, root_of, weighted_sum, weights

sizes_lists = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(sizes_lists)
def test_weights_of_a_mean_are_the_shares_of_the_rows(sizes: list[int]) -> None:
    given_weights = weights("mean", sizes, [])
    assert math.isclose(sum(given_weights), 1)
    assert given_weights == [size / sum(sizes) for size in sizes]
    assert weights("sum", sizes, []) == [1.0] * len(sizes)


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


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_weights_of_a_function_are_the_shares_of_what_counts(counts: list[int]) -> None:
    targets = [torch.tensor([1] * count + [-100] * 3) for count in counts]
    found = weights(lambda target: (target != -100).sum(), [1] * len(counts), targets)
    assert found == [count / sum(counts) for count in counts]


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_weights_that_are_none(values: list[float]) -> None:
    with pytest.raises(ArgumentError, match=r"reduction: the weights .*expected non-negative"):
        weights(lambda target: values[int(target)], [1, 1], [0, 1])


def test_unknown_reduction() -> None:
    with pytest.raises(ArgumentError, match=r"reduction='max': expected 'mean', 'sum' or a function"):
        weights("max", [1], [None])  # type: ignore[arg-type]


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=9))
def test_weighted_sum_adds_in_ascending_order(values: list[float]) -> None:
    losses = [torch.tensor(value) for value in values]
    expected = losses[0] * 0.3
    for loss in losses[1:]:
        expected = expected + loss * 0.3
    found = weighted_sum(losses, [0.3] * len(losses))
    assert found is not None
    assert torch.equal(found, expected)


def test_weighted_sum_leaves_out_what_has_no_weight() -> None:
    nan, two = torch.tensor(float("nan")), torch.tensor(2.0)
    assert weighted_sum([nan, two], [0.0, 1.0]) == two
    assert weighted_sum([None, two], [0.5, 0.5]) is None
    found = weighted_sum([torch.tensor([3.0])], [0.5])
    assert found is not None
    assert found.shape == ()


def test_a_root_of_weight_zero_passes_zeros_back() -> None:
    leaf = torch.ones(3, requires_grad=True)
    loss = (leaf * 0).sum() / torch.zeros(())
    assert root_of(loss, 0.5, [leaf]) is loss
    root = root_of(loss, 0.0, [leaf, loss])
    root.backward(torch.zeros_like(loss))
    assert torch.equal(leaf.grad, torch.zeros(3))
    assert root_of(loss, 0.0, [loss]) is loss


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
    assert (own_loss(output) is SCALAR) == found


def head(loss: Any, *, needed: bool = True, microbatches: int = 2) -> LossHead:
    def leaving(leaves: Any) -> Any:
        return nullcontext()

    partition: Any = SimpleNamespace(
        build_output=lambda leaves: leaves[0], leaving=leaving, elsewhere={}, stages=(), left=()
    )
    return LossHead(loss, [partition] * microbatches, Streams(0), needed=needed)


def test_head_without_a_target_has_a_loss_only_if_the_model_has() -> None:
    made = head(lambda output, target: output.sum(), needed=False)
    made.start(None, [1.0], keep_outputs=True)
    assert made(0, [torch.ones(2)]) is None
    own = head(None, needed=False)
    own.start(None, [1.0], keep_outputs=False)
    assert own(0, [SCALAR]) is SCALAR
