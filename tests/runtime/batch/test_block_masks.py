"""FlexAttention's block masks and `torch.cond` in a pipeline. On CPU torch has their forward only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, flex_attention

import penstock
from penstock._base.errors import ShapeError
from scaffolding.proofs import proven

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
        self.blocks = nn.ModuleList(Attention(make) for _ in range(2))

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


def band(width: int) -> BlockMask:
    return masked(lambda b, h, q, k, width=width: (q - k).abs() < width, None)


BANDS = band(3), band(20)


def from_global() -> BlockMask:
    return masked(lambda b, h, q, k: k < LENGTHS[b], ROWS)


class Opened(Attention):
    """Calls FlexAttention in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: BlockMask | None = None) -> Tensor:
        return self.last(super().forward(x, mask))


class Makes(Net):
    """Makes its mask in its own forward."""

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
        for block in self.blocks[:1]:
            x = block(x)
        lengths = lengths + (x[:, 0, 0] > 0)  # known only while it runs
        function = and_masks(lambda b, h, q, k: q >= k, lambda b, h, q, k: k < lengths[b])
        mask = create_block_mask(function, len(x), None, LENGTH, LENGTH, device="cpu")
        for block in self.blocks[1:]:
            x = block(x, mask)
        return x


@pytest.mark.parametrize(
    ("make", "masks"),
    [
        (Net, (padded(LENGTHS), padded(LENGTHS.flip(0)))),  # is cut, and a new one needs no new recording
        (Net, (from_global(),)),  # its function goes on counting samples
        (lambda: Net(causal), ()),
        (Opened, (causal(),)),
        (Opened, (padded(LENGTHS), padded(LENGTHS.flip(0)))),
        (Makes, (LENGTHS, LENGTHS.flip(0))),  # follows each microbatch
        (Net, BANDS),  # with another default it is another function
    ],
)
def test_masks_do_as_in_the_unsplit_model(make: Callable[[], nn.Module], masks: tuple[Any, ...]) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(ROWS, LENGTH, WIDTH), make().requires_grad_(False)
    with penstock.pipeline(model, (x, *masks[:1]), ranks=2, microbatches=3, balance="layers") as pipe:
        for mask in masks or (None,):
            given = () if mask is None else (mask,)
            torch.testing.assert_close(pipe.predict(x, *given), model(x, *given), rtol=0, atol=1e-6)
        kinds = len(masks) if masks and masks[0] is BANDS[0] else 1
        assert len(list(pipe.session.bound_schedules)) == 1 + kinds  # one for training, one for all masks


class Maps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scales = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x, scales = self.first(x), self.scales
        mean = x.mean()
        return self.last(torch.vmap(torch.vmap(lambda e: e * mean))(x) + torch.func.vmap(lambda row: row * scales)(x))


def test_vmap_in_the_models_own_forward_trains() -> None:
    x, options = torch.randn(6, WIDTH), {"ranks": 2, "microbatches": 3, "full_batch": False}
    proven(Maps(), x, x, **options)


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
    options = {"ranks": 2, "microbatches": 3, "full_batch": False}
    proven(Branches(in_block), x, x, **options)
