"""The names by which tensors are saved: the unsplit model's, each tensor once."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

import penstock
from penstock.partition.names import known_names
from scaffolding.models import squared_error


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(5))
        self.twice = nn.Module()
        self.twice.register_buffer("scale", self.scale)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale)


def test_a_tensor_is_known_by_its_first_name() -> None:
    names = known_names(Tied())
    assert names["second.weight"] == "first.weight"
    assert names["twice.scale"] == "scale"
    assert names["second.bias"] == "second.bias"


def test_the_state_of_layers_goes_back_under_their_own_names() -> None:
    layers = [nn.Sequential(OrderedDict([(name, nn.Linear(5, 5))])) for name in ("up", "down")]
    with penstock.pipeline(layers, (torch.randn(4, 5),), loss=squared_error, ranks=2, microbatches=2) as pipe:
        state = {name: torch.ones_like(tensor) for name, tensor in pipe.state_dict().items()}
        assert list(state) == ["up.weight", "up.bias", "down.weight", "down.bias"]
        pipe.load_state_dict(state)
    assert all(parameter.eq(1).all() for layer in layers for parameter in layer.parameters())
