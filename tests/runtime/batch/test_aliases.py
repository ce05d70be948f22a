"""Inputs that the forward updates in place, and that share memory with other tensors of the batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError, Microbatch, Microbatches, Pipeline, pipeline, verify
from scaffolding.models import squared_error

WIDTH, ROWS = 4, 6


class Model(nn.Module):
    """Rectifies its first input: in place, where it is told to."""

    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.first = nn.ReLU(inplace=inplace)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, beside: Tensor | None = None) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x if beside is None else x + beside


def wide() -> Tensor:
    return torch.randn(ROWS, 2 * WIDTH, generator=torch.Generator().manual_seed(0))


def pipe_for(x: Any, beside: Any = None, *, inplace: bool = True, **options: Any) -> Pipeline:
    torch.manual_seed(0)
    given = (x,) if beside is None else (x, beside)
    return pipeline(Model(inplace), given, loss=squared_error, ranks=2, microbatches=2, **options)


def halves(tensor: Tensor) -> Microbatches:
    return Microbatches(tensor.chunk(2))


def assert_refused(pipe: Pipeline, words: str, *args: Any, **given: Any) -> None:
    with pytest.raises(ArgumentError, match=words):
        pipe.step(*args, **given)


TARGET = r"updates input args\[0\] in place, and target shares memory with it"


def test_an_input_that_is_the_target_too() -> None:
    x = wide()[:, :WIDTH].contiguous()
    with pipe_for(x) as pipe:
        for target in (x, x[:], x.view(ROWS, 2, 2).flatten(1), torch.from_numpy(x.numpy())):
            assert_refused(pipe, TARGET, x, target=target)
            with pytest.raises(ArgumentError, match="and target shares memory with it"):
                pipe.evaluate(x, target=target)
        assert all(parameter.grad is None for parameter in pipe.parameters())
        pipe.predict(x)
        pipe.step(x, target=x.clone())
    with pytest.raises(ArgumentError, match=TARGET + r".*x\.clone\(\)"):
        verify(Model, (x,), target=x, loss_fn=squared_error, ranks=2, microbatches=2)


def test_two_inputs_in_the_same_memory() -> None:
    x, y = wide().chunk(2, 1)
    with pipe_for(x, y) as pipe:
        assert_refused(pipe, r"input args\[0\] in place, and args\[1\] shares memory with it", x, x, target=y)
        assert_refused(pipe, r"and kwargs\['beside'\] shares memory with it", x, beside=x, target=y)
        pipe.step(x, y, target=y)  # only the first one is updated


def test_columns_of_one_tensor_do_not_overlap() -> None:
    both = wide()
    x, y = both[:, :WIDTH], both[:, WIDTH:]
    of_another_type = torch.from_numpy(np.asarray(both.numpy()).view(np.uint8))
    with pipe_for(x) as pipe:
        pipe.step(x, target=y)
        for target in (both[:, WIDTH - 1 : -1], of_another_type[:, :WIDTH]):
            assert_refused(pipe, TARGET, x, target=target)


def test_batches_that_are_cut_already_or_by_a_function() -> None:
    def split(args: Any, kwargs: Any, target: Any, microbatches: int) -> list[Microbatch]:
        pairs = zip(args[0]["x"].chunk(2), [None] * 2 if target is None else target.chunk(2), strict=True)
        return [Microbatch((x,), target=y) for x, y in pairs]

    x, y = (half.contiguous() for half in wide().chunk(2, 1))
    with pipe_for(halves(x)) as pipe:
        for target in (halves(x), x):
            assert_refused(pipe, TARGET, halves(x), target=target)
        pipe.step(halves(x), target=halves(y))
        for pieces in ([x[:3], x[:3]], [x[:3], x[2:5]]):
            words = r"and args\[0\] of another microbatch shares memory with it"
            assert_refused(pipe, words, Microbatches(pieces), target=y)
        pipe.step(Microbatches([x[:3], x[3:]]), target=y)
    with pipe_for({"x": x}, split=split) as pipe:
        assert_refused(pipe, TARGET, {"x": x}, target=x)
        pipe.step({"x": x}, target=y)


def test_what_is_only_read_may_be_given_twice() -> None:
    x = wide()[:, :WIDTH].contiguous()
    with pipe_for(x, x, inplace=False) as pipe:
        assert pipe.step(x, x, target=x).loss == pipe.step(x, x.clone(), target=x.clone()).loss
