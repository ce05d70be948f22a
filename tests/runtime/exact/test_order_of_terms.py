"""In which order the terms of a gradient are added: as one device adds them, told by plain torch, whatever the order of
the schedule's own actions."""

from __future__ import annotations

import copy
import itertools
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.pipe.optimizing import clip
from penstock.schedule import from_csv
from scaffolding.by_hand import assert_same_gradients, step_by_hand

ROWS, WIDTH, MICROBATCHES = 11, 33, 3


class Twice(nn.Module):
    """A norm whose weights cannot wait for W, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(torch.tanh(self.layer(self.norm(x)))))


def spread(output: Tensor, target: Tensor) -> Tensor:
    """A loss whose microbatches have gradients of unlike sizes, so that another order shows in their sum."""
    return ((output - target) * (1 + 100 * target.abs())).square().mean()


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)


ORDERS = list(itertools.permutations(range(MICROBATCHES)))


@pytest.mark.parametrize(("forwards", "backwards"), [*zip(ORDERS, ORDERS, strict=True), *pairwise(ORDERS)])
def test_microbatches_are_added_in_their_order_whatever_the_order_of_i(
    forwards: tuple[int, ...], backwards: tuple[int, ...]
) -> None:
    """Where I comes in another order than W, and where F does."""
    torch.manual_seed(0)
    model, (x, target) = Twice(), batch()
    twin = copy.deepcopy(model)
    row = [*(f"0F{k}" for k in forwards), *(f"0I{k}" for k in backwards), *(f"0W{k}" for k in range(MICROBATCHES))]
    for _ in range(2):  # the first backward of a pipeline is whole, to learn what can wait
        step_by_hand(twin, (x,), target, spread, MICROBATCHES)
    schedule = from_csv(",".join(row))
    with penstock.pipeline(model, (x,), loss=spread, ranks=1, schedule=schedule) as pipe:
        for _ in range(2):
            pipe.step(x, target=target)
    assert_same_gradients(model, twin)


def test_the_order_would_show() -> None:
    """Or the test above could not fail: any other order of the terms gives other bits."""
    torch.manual_seed(0)
    model, (x, target) = Twice(), batch()
    pieces = list(zip(torch.split(x, [4, 4, 3]), torch.split(target, [4, 4, 3]), strict=True))
    sums = []
    for order in ORDERS:
        model.zero_grad()
        for k in order:
            spread(model(pieces[k][0].clone()), pieces[k][1]).backward(torch.tensor(len(pieces[k][0]) / ROWS))
        sums.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, ascending in sums[0].items():
        for order, other in zip(ORDERS, sums, strict=True):  # the first two terms may change places
            assert torch.equal(ascending, other[name]) == (order[-1] == MICROBATCHES - 1), (name, order)


def test_norms_are_added_in_the_models_order_whichever_rank_has_them() -> None:
    def of_two_ranks(norms: dict[str, Tensor]) -> list[dict[str, Tensor]]:
        return [{name: norms[name] for name in [*norms][rank::2]} for rank in range(2)]

    for seed in range(50):  # not each sum shows its order
        torch.manual_seed(seed)
        grads = {str(n): torch.randn(9) for n in range(500)}
        one, two = (clip(grads, [*grads], gather, max_norm=1e9) for gather in (lambda norms: [norms], of_two_ranks))
        assert torch.equal(one, two)
