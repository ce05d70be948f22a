"""FlexAttention's block masks and `torch.cond` in a pipeline. On CPU torch has their forward only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

import penstock
from penstock.errors import PartitionError, ShapeError

ROWS, LENGTH, WIDTH = 5, 32, 16
LENGTHS = torch.tensor([32, 5, 17, 9, 25])

pytestmark = [
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
    pytest.mark.filterwarnings(r"ignore:.torch\.jit"),  # by the compiler, when it is imported
]


class Attention(nn.Module):
    def __init__(self, make: Callable[[], BlockMask] | None = None) -> None:
        super().__init__()
        self.qkv, self.make = nn.Linear(WIDTH, 3 * WIDTH), make

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        attended: Any = flex_attention(q, k, v, block_mask=self.make() if self.make else mask)
        return x + attended.transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self, make: Callable[[], BlockMask] | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention(make) for _ in range(4))

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x, mask)
        return x


def masked(function: Callable[..., Tensor], rows: int | None) -> BlockMask:
    return create_block_mask(function, rows, None, LENGTH, LENGTH, device="cpu")


def causal() -> BlockMask:
    return masked(lambda b, h, q, k: q >= k, None)


def padded(lengths: Tensor) -> BlockMask:
    return masked(lambda b, h, q, k: (q >= k) & (k < lengths[b]), len(lengths))


def from_global() -> BlockMask:
    return masked(lambda b, h, q, k: k < LENGTHS[b], ROWS)


def assert_runs_as_unsplit(model: nn.Module, *masks: Any) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, LENGTH, WIDTH), model.requires_grad_(False)
    with penstock.pipeline(model, (x, *masks[:1]), ranks=2, microbatches=3, balance="layers") as pipe:
        for mask in masks or (None,):
            given = () if mask is None else (mask,)
            output = pipe.predict(x, *given)
            torch.testing.assert_close(output, model(x, *given), rtol=0, atol=1e-6)
        assert len(list(pipe.session.steps.bound_schedules)) == 2  # one for training, one for all masks


def test_a_mask_for_every_sample() -> None:
    assert_runs_as_unsplit(Net(), causal())


def test_a_mask_for_each_sample_is_cut_and_a_new_one_needs_no_new_recording() -> None:
    assert_runs_as_unsplit(Net(), padded(LENGTHS), padded(LENGTHS.flip(0)))


def test_the_mask_function_goes_on_counting_samples() -> None:
    assert_runs_as_unsplit(Net(), from_global())


def test_a_mask_made_in_a_block() -> None:
    assert_runs_as_unsplit(Net(causal))


class Opened(Attention):
    """Calls FlexAttention in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        return self.last(super().forward(x, mask))


def test_masks_in_the_models_own_forward_are_followed_or_refused() -> None:
    assert_runs_as_unsplit(Opened(), causal())
    x, model = torch.randn(ROWS, LENGTH, WIDTH), Opened().requires_grad_(False)
    with pytest.raises(PartitionError, match="passes on a function"):
        penstock.pipeline(model, (x, padded(LENGTHS)), ranks=2, microbatches=3, balance="layers")


def test_plain_calls_work_afterwards() -> None:
    q = torch.randn(2, 2, LENGTH, 8)
    before = flex_attention(q, q, q)
    assert_runs_as_unsplit(Net())
    assert torch.equal(flex_attention(q, q, q), before)


def test_a_mask_for_other_samples_is_refused() -> None:
    x, model = torch.randn(ROWS, LENGTH, WIDTH), Net().requires_grad_(False)
    with pytest.raises(ShapeError, match="BlockMask for 4 rows; expected 5"):
        penstock.pipeline(model, (x, padded(LENGTHS[:4])), ranks=2, microbatches=3, balance="layers")


class Chooses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))  # type: ignore[no-any-return]


class Branches(nn.Module):
    def __init__(self, in_block: bool) -> None:
        super().__init__()
        self.in_block = in_block
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), Chooses(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(self.inner(x) if self.in_block else self.inner.forward(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch's own compiler looks at it
@pytest.mark.parametrize("in_block", [True, False])
def test_cond_trains(in_block: bool) -> None:
    x = torch.randn(3, WIDTH)
    options = {"ranks": 2, "microbatches": 3, "whole_batch": False}
    report = penstock.verify(Branches(in_block), (x,), target=x, loss_fn=nn.functional.mse_loss, **options)
    assert report.ok, report.summary()


@pytest.mark.parametrize("in_block", [True, False])
def test_cond(in_block: bool) -> None:
    model, x = Branches(in_block).requires_grad_(False), torch.randn(3, WIDTH)
    with penstock.pipeline(model, (x,), ranks=2, microbatches=3, balance="layers") as pipe:
        expected = torch.cat([model(row) for row in x.split(1)])
        torch.testing.assert_close(pipe.predict(x), expected, rtol=0, atol=1e-6)
