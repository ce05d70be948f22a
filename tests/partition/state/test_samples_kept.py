"""What a block keeps for each sample of a microbatch is refused, since the next microbatch has others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import PartitionError, pipeline, verify
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.proofs import proven

WIDTH, STEPS = 4, 5


class Recurrent(nn.Module):
    """Trained over steps: each batch continues the sequences of the one before it."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU, *, first: bool = True) -> None:
        super().__init__()
        self.layer, self.state = kind(WIDTH, WIDTH, batch_first=first), None

    def forward(self, x: Tensor) -> Tensor:
        out, state = self.layer(x, self.state)
        self.state = tuple(s.detach() for s in state) if isinstance(state, tuple) else state.detach()
        return out


class Smooths(nn.Module):
    """Mixes in what it returned before."""

    def __init__(self, kept: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.kept, self.held = nn.Linear(WIDTH, WIDTH), kept, {"last": None}

    def forward(self, x: Tensor) -> Tensor:
        y, last = self.layer(x), self.held["last"]
        self.held["last"] = self.kept(y.detach())
        return y if last is None else y + last


class InModel(nn.Module):
    """Passes its state in and out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, state = self.layer(self.first(x).transpose(0, 1), state.transpose(0, 1).contiguous())
        return self.last(out.transpose(0, 1)), state.detach().transpose(0, 1)


def between(block: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Linear(WIDTH, WIDTH), nn.Tanh())


def batch(rows: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, STEPS, WIDTH, generator=generator), torch.randn(rows, STEPS, WIDTH, generator=generator)


def test_it_is_refused_along_the_dimension_of_the_batch_in_evaluation_too() -> None:
    x, _y = batch(STEPS)
    with pytest.raises(PartitionError, match=r"'1.state.* each of a microbatch's samples"):
        pipeline(
            between(Recurrent(first=False)), (x,), loss=F.mse_loss, ranks=2, microbatches=5, batch_dims=1, seed=0
        ).predict(x)


def test_with_one_microbatch_it_is_kept_from_step_to_step() -> None:
    model, plain = between(Recurrent()), between(Recurrent())
    x, y = batch()
    with pipeline(model, (x,), loss=F.mse_loss, ranks=2, microbatches=1, schedule="gpipe") as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            step_by_hand(plain, (x,), y, F.mse_loss, 1)
            assert_same_gradients(model, plain)


def test_what_does_not_grow_with_the_samples_is_kept() -> None:
    """Also where its width happens to be the number of samples in a microbatch."""
    x, y = batch(2 * WIDTH)
    proven(
        lambda: between(Smooths(lambda y: y.mean((0, 1)))),
        x,
        y,
        ranks=2,
        microbatches=2,
        schedule="gpipe",
        full_batch=False,
    )


def test_the_remedy_trains_as_one_device() -> None:
    x, y = batch()
    torch.manual_seed(0)
    verify(
        InModel,
        (x, torch.zeros(8, 1, WIDTH)),
        target=y,
        loss_fn=lambda out, y: F.mse_loss(out[0], y),
        ranks=2,
        microbatches=4,
    ).raise_if_failed()
