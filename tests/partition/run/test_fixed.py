"""Objects that blocks are given, that a stage cannot make anew for each microbatch, and that the forward changes."""

from __future__ import annotations

import array
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, pipeline, verify
from scaffolding.models import squared_error

WIDTH = 4

Make, Use = Callable[[], Any], Callable[[Any], Any]


def inside(value: Any) -> Any:
    """What a dict or a tuple holds."""
    return next(iter(value.values())) if isinstance(value, dict) else value[0] if isinstance(value, tuple) else value


def grows(given: Any) -> float:
    inside(given).add(len(inside(given)))
    return float(len(inside(given)))


def counts(given: Any) -> float:
    inside(given).__iadd__(1)
    return float(given[0])


def lengthens(given: Any) -> float:
    given.append(1)
    return float(len(given))


def draws(given: Any) -> float:
    return float(inside(given).random())


def adds_up(given: Any) -> float:
    given.count += 1.0
    return float(given.count)


class Counter(nn.Module):
    """A module that is none of the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0.0


class Closing:
    """No stage makes such an object anew: it cleans up after itself."""

    def __init__(self) -> None:
        self.count = 0.0

    def __del__(self) -> None:
        pass


CHANGED: dict[str, tuple[Make, Use, str]] = {
    "set": (set, grows, "set"),
    "dict of a set": (lambda: {"k": set()}, grows, "set"),
    "tuple of a set": (lambda: (set(), 1), grows, "set"),
    "ndarray": (lambda: np.zeros(1), counts, "ndarray"),
    "bytearray": (bytearray, lengthens, "bytearray"),
    "array": (lambda: array.array("d"), lengthens, "array"),
    "module": (Counter, adds_up, "Counter"),
    "an object that cleans up": (Closing, adds_up, "Closing"),
    "Random": (lambda: random.Random(0), draws, "Random"),
    "Generator": (lambda: np.random.default_rng(0), draws, "Generator"),
    "tuple of a Generator": (lambda: (np.random.default_rng(0),), draws, "Generator"),
    "RandomState": (lambda: np.random.RandomState(0), lambda given: float(given.rand()), "RandomState"),
}


class Block(nn.Module):
    def __init__(self, use: Use) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(WIDTH, WIDTH), use

    def forward(self, x: Tensor, given: Any) -> Tensor:
        return x + torch.tanh(self.linear(x)) * self.use(given)


class Model(nn.Module):
    def __init__(self, make: Make, use: Use, between: Use = id) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(use) for _ in range(2))
        self.make, self.between = make, between

    def forward(self, x: Tensor) -> Tensor:
        given = self.make()
        for block in self.blocks:
            x = block(x, given)
            self.between(given)
        return x


def refusal_of(model: nn.Module) -> str:
    with pytest.raises(PartitionError) as caught:
        pipeline(model, (torch.ones(2, WIDTH),), loss=squared_error, ranks=2, microbatches=2)
    return str(caught.value)


@pytest.mark.parametrize(("make", "use", "kind"), CHANGED.values(), ids=list(CHANGED))
def test_a_block_must_not_change_what_every_microbatch_is_given(make: Make, use: Use, kind: str) -> None:
    message = refusal_of(Model(make, use))
    assert f"passes an object of type {kind} to 'blocks.0', which changes it" in message
    assert ("Draw from torch" if kind.startswith(("Ra", "G")) else "Pass tensors, or a list") in message


def test_nor_must_the_forward_between_two_blocks_and_at_its_end() -> None:
    assert "'blocks.0', and changes it afterwards" in refusal_of(Model(set, lambda given: len(given) + 1, grows))


class OnlyOnce(Model):
    def forward(self, x: Tensor) -> Tensor:
        given = self.make()
        for block in self.blocks:
            x = block(x, given)
        self.between(given)
        return x


def test_nor_must_the_forward_behind_the_last_block() -> None:
    assert "'blocks.0', and changes it afterwards" in refusal_of(OnlyOnce(set, lambda given: len(given) + 1, grows))


def test_a_later_block_that_changes_it_is_named() -> None:
    model = Model(set, len)
    model.blocks[1].use = grows
    assert "to 'blocks.0', and 'blocks.1' changes it" in refusal_of(model)


def reads(given: Any) -> float:
    places, table, generator, *others = given["all"]
    return float(len(places) + table.sum() + isinstance(generator, random.Random) + sum(one.count for one in others))


def test_what_is_only_read_is_passed_on() -> None:
    torch.manual_seed(0)
    model = Model(lambda: {"all": ({1, 2}, np.ones(2), random.Random(0), Counter(), Closing())}, reads)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    report = verify(model, (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=2, schedule="gpipe")
    assert report.ok, report.summary()


class Shares(Model):
    """Passes on what the model keeps: a module, and itself."""

    def __init__(self) -> None:
        super().__init__(Counter, lambda given: 2.0)
        self.counter = Closing()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, (self, self.linear, self.counter))
        return x


def test_what_the_model_keeps_may_be_passed_on() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    report = verify(Shares(), (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=2, schedule="gpipe")
    assert report.ok, report.summary()


def test_the_generators_of_the_libraries_have_streams() -> None:
    """They are objects, too, and may be passed on (as scikit-learn's `check_random_state(None)` gives them)."""
    torch.manual_seed(0)
    generator = np.random.random_sample.__self__  # type: ignore[attr-defined]
    model = Model(lambda: generator, lambda given: float(given.rand()))
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    report = verify(model, (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=2, schedule="gpipe")
    assert report.ok, report.summary()
