"""Masks of floating-point numbers, which `nn.TransformerEncoder` and its siblings compare with a causal one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock import PartitionError, pipeline
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.models import Forward

ROWS, LENGTH, WIDTH = 4, 6, 8
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)
BANDED = CAUSAL.masked_fill(CAUSAL.T.roll(3, 1) < 0, -torch.inf).fill_diagonal_(0)
X = torch.randn(ROWS, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
LAYER: dict[str, Any] = {"dim_feedforward": 16, "dropout": 0.0, "batch_first": True}


class Masked(nn.Module):
    def __init__(self, kind: str, mask: Tensor | None, *, is_buffer: bool = True) -> None:
        super().__init__()
        self.kind = kind
        if kind == "encoder":
            layer = nn.TransformerEncoderLayer(WIDTH, 2, **LAYER)
            self.net: Any = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        elif kind == "decoder":
            self.net = nn.TransformerDecoder(nn.TransformerDecoderLayer(WIDTH, 2, **LAYER), 2)
        else:
            self.net = nn.Transformer(WIDTH, 2, 1, 1, **LAYER)
        if is_buffer:
            self.register_buffer("mask", mask)
        else:
            self.mask = mask

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        mask = self.mask if mask is None else mask
        if self.kind == "encoder":
            return self.net(x, mask)
        return self.net(x, x, tgt_mask=mask) if self.kind == "decoder" else self.net(x, x, mask, mask)


def assert_trains_as_plain_torch(model: nn.Module, *masks: Tensor, **options: Any) -> None:
    reference = copy.deepcopy(model)
    options |= {"ranks": 2, "microbatches": 2, "loss_fn": mse_loss}
    with pipeline(model, (X, *masks[:1]), **options) as pipe:
        for mask in masks or (None, None):
            given = () if mask is None else (mask,)
            model.zero_grad()
            reference.zero_grad()
            called = copy.copy(reference)
            called.forward = lambda x, given=given: reference(x, *given)  # type: ignore[method-assign]
            expected = step_by_hand(called, (X,), torch.zeros_like(X), mse_loss, 2)
            assert torch.equal(pipe.step(X, *given, target=torch.zeros_like(X)).loss, expected.total)
            assert_same_gradients(model, reference)


@pytest.mark.parametrize(
    ("kind", "is_buffer", "mask"), [("encoder", True, BANDED), ("decoder", False, CAUSAL), ("both", True, CAUSAL)]
)
def test_the_models_own_mask(kind: str, is_buffer: bool, mask: Tensor) -> None:
    torch.manual_seed(0)
    assert_trains_as_plain_torch(Masked(kind, mask.clone(), is_buffer=is_buffer))


@pytest.mark.parametrize("kind", ["encoder", "both"])
def test_a_mask_among_the_inputs(kind: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_plain_torch(Masked(kind, None), CAUSAL, BANDED, batch_dims={"args": (0, None)})


def test_a_mask_that_changes_between_steps() -> None:
    torch.manual_seed(0)
    model = Masked("encoder", CAUSAL.clone())
    with pipeline(model, (X,), ranks=2, microbatches=2, loss_fn=mse_loss) as pipe:
        for mask in (CAUSAL, BANDED, CAUSAL):
            model.mask.copy_(mask)
            expected = step_by_hand(copy.deepcopy(model), (X,), torch.zeros_like(X), mse_loss, 2)
            assert torch.equal(pipe.step(X, target=torch.zeros_like(X)).loss, expected.total)


def test_a_branch_on_a_buffer_that_the_forward_updates_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = self.second(self.first(x)) * (2 if self.count > 0 else 1)
        self.count += 1
        return x

    model = Forward(forward, first=nn.Linear(WIDTH, WIDTH), second=nn.Linear(WIDTH, WIDTH))
    model.register_buffer("count", torch.zeros(()))
    with pytest.raises(PartitionError, match=rf"branches on a buffer and updates it at {__file__}:\d+"):
        pipeline(model, (X,), ranks=2, microbatches=2)
