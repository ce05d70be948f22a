"""Lists of layers, as torch, DeepSpeed and torchgpipe take them; stages made by hand."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError, inspect, pipeline, verify
from scaffolding.models import OneLayer, squared_error
from scaffolding.small import WIDTH, batch

X, Y = batch()
MASK = (X > 0).float()


class Masked(nn.Module):
    """A stage made by hand, which torch gives keyword arguments of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.linear(x)
        return y if mask is None else y * mask


class OneTuple(OneLayer):
    """A layer in DeepSpeed's manner."""

    def forward(self, inputs: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, mask = inputs
        return self.layer(x) * mask, mask


class Pair(nn.Module):
    """A layer in the manner of torch's stages."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(x) * mask, mask


def both(layers: list[Any], plain: Callable[..., Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The layers as a pipeline, and what they are meant to do on the whole batch."""
    alone, layers = copy.deepcopy(layers), copy.deepcopy(layers)
    loss = squared_error(plain(alone), Y)
    loss.backward()
    with pipeline(layers, args, kwargs, loss_fn=squared_error, ranks=2, microbatches=1) as pipe:
        assert pipe.step(*args, target=Y, **kwargs).loss == loss
    for one, other in zip(layers, alone, strict=True):
        for mine, theirs in zip(*(list(getattr(each, "parameters", list)()) for each in (one, other)), strict=True):
            assert torch.equal(mine.grad, theirs.grad)


def test_a_layer_gets_a_tuple_whole_or_in_parts() -> None:
    layers = [OneTuple(WIDTH), lambda both: (both[0].relu(), both[1]), Pair(), OneTuple(WIDTH), lambda both: both[0]]

    def plain(layers: list[Any]) -> Tensor:
        found = layers[2](*layers[1](layers[0]((X, MASK))))
        return layers[4](layers[3](found))

    both(layers, plain, ((X, MASK),), {})
    both(layers, plain, (X, MASK), {})


def test_functions_are_layers() -> None:
    layers = [nn.Linear(WIDTH, WIDTH), torch.tanh, nn.Linear(WIDTH, WIDTH), nn.functional.gelu, nn.Flatten()]
    both(layers, lambda each: each[4](each[3](each[2](each[1](each[0](X))))), (X,), {})
    found = inspect(layers, (X,), stages=3, microbatches=1, cuts=["1", "2"]).stages
    assert [stage.first_module for stage in found[1:]] == ["1", "2"]

    def tied_head() -> list[Any]:
        tied = nn.Linear(WIDTH, WIDTH)
        return [tied, torch.tanh, lambda x: nn.functional.linear(x, tied.weight)]

    assert verify(tied_head, (X,), target=Y, loss_fn=squared_error, ranks=2, microbatches=2, cuts=["1"]).ok


def test_keyword_arguments_go_to_every_stage_that_accepts_them() -> None:
    layers = [Masked(), torch.relu, nn.Linear(WIDTH, WIDTH), Masked()]

    def plain(layers: list[Any]) -> Tensor:
        return layers[3](layers[2](torch.relu(layers[0](X, MASK))), MASK)

    both(layers, plain, (X,), {"mask": MASK})
    both(layers, plain, (), {"x": X, "mask": MASK})  # the later ones have got their x


def test_a_keyword_that_no_stage_accepts_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="kwargs: no layer accepts 'masks'; omit what the layers do not take"):
        pipeline([Masked(), Masked()], (X,), {"masks": MASK}, loss_fn=squared_error, ranks=2)


def test_what_is_no_layer() -> None:
    with pytest.raises(ArgumentError, match=r"model=Masked: this is a class; pass an instance, Masked\(...\)"):
        pipeline([nn.Linear(1, 1), Masked], (X,))  # type: ignore[list-item]
