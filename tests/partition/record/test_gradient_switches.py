"""Activations that shall take a gradient from some line on, and distributions that would check their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Distribution, Normal, kl_divergence

from scaffolding.models import Layers, squared_error
from scaffolding.proofs import proven

WIDTH = 4


def assign(x: Tensor) -> Tensor:
    x.requires_grad = True
    return x


class Switches(Layers):
    """As the feature extractor of wav2vec2: what comes of its inputs takes a gradient, for checkpointing's sake."""

    def __init__(self, switch: Callable[[Tensor], Tensor]) -> None:
        super().__init__(WIDTH, 3)
        self.switch = switch

    def forward(self, x: Tensor) -> Tensor:
        before = x[:, None]
        y = self.switch(before)
        assert y.requires_grad
        first = self.layers[0](y)
        return (self.layers[2](self.layers[1](first)) + before * first.detach())[:, 0]


@pytest.mark.parametrize("switch", [assign, Tensor.requires_grad_], ids=["assigned", "called"])
def test_an_activation_that_shall_take_a_gradient(switch: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, WIDTH)
    proven(Switches(switch), x, y, ranks=3, microbatches=2, cuts=["layers.1", "layers.2"], exact=True)


class Sampler(nn.Module):
    """Draws what it hands on from a distribution, as variational autoencoders do."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = self.encoder(x).chunk(2, -1)
        drawn = Normal(mean, scale.exp())
        return self.decoder(drawn.rsample()), kl_divergence(drawn, Normal(0.0, 1.0))


@pytest.fixture
def checked_distributions() -> Iterator[None]:
    """As torch sets out; `torch.compile`, once called, switches the checks of the whole process off."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(True)
    yield
    Distribution.set_default_validate_args(before)


@pytest.mark.usefixtures("checked_distributions")
def test_distributions_are_not_checked_while_they_are_recorded() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(2, 4, WIDTH)
    loss = lambda output, target: squared_error(output[0], target) + output[1].mean()  # noqa: E731
    proven(Sampler(), x, y, loss, ranks=2, microbatches=2)
    assert Distribution._validate_args
