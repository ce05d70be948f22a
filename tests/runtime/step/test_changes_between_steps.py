"""What a user changes between two steps counts from the next step on, as it does in plain torch, or is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock._base.errors import ArgumentError
from penstock.partition.state.settings import Assumptions
from scaffolding.by_hand import assert_steps_by_hand
from scaffolding.models import Forward, squared_error

STEPS = 3


class Block(nn.Module):
    """Draws where its rate is not 0."""

    scale, rate, strength = 1.0, 0.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.linear(x).tanh(), self.rate)

    def strengthened(self, x: Tensor) -> Tensor:
        return x * self.strength


class Tower(nn.Module):
    """Holds layers, which the model calls one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def decorated(forward: Callable[..., Any]) -> Callable[..., Any]:
    """As transformers' `can_return_tuple` and `capture_outputs` wrap forwards."""

    @wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


class Reader(nn.Module):
    """Reads attributes of all kinds in a forward that is recorded call by call."""

    of_class = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.nested, self.tower = nn.ModuleDict({"h": nn.ModuleList([Block()])}), Tower()
        self.number: Any = 1.0
        self.table = {"a": [1.0]}
        self.config = SimpleNamespace(inner=SimpleNamespace(t=1.0))
        self.tensor = torch.tensor(1.0)
        self.array = np.ones(2)

    @property
    def of_property(self) -> float:
        return self.blocks[1].strength

    @decorated
    def forward(self, x: Tensor, options: Any = None) -> Tensor:
        for layer in (*self.nested.h, *self.tower.layers):
            x = x if getattr(layer, "left_out", False) else layer(x) * layer.scale
        for block in self.blocks:
            x = block.strengthened(block(x) * block.scale)
        x = x * float(self.array[0]) * self.of_property
        factor = self.number * self.table["a"][0] * self.config.inner.t * self.of_class
        bonus = getattr(self, "bonus", 1.0) * (1.0 if options is None else options.t)
        return torch.tanh(x) * float(factor) * self.tensor * bonus


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(4, 5, generator=generator), torch.randn(4, 5, generator=generator)) for _ in range(STEPS)]


def model() -> Reader:
    torch.manual_seed(0)
    return Reader()


def outputs(ranks: int, change: Callable[[Reader, int], object]) -> list[Tensor]:
    reader, found = model(), []
    options: dict[str, Any] = {"ranks": ranks, "schedule": "gpipe", "microbatches": 2, "seed": 0}
    with penstock.pipeline(reader, (batches()[0][0],), loss=squared_error, **options) as pipe:
        for step, (x, y) in enumerate(batches()):
            change(reader, step)
            found += pipe.step(x, target=y, outputs=True).outputs
    return found


def doubled(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 2 * output


def patch_forward(reader: Reader) -> None:
    forward = reader.forward
    reader.forward = lambda x: 2 * forward(x)  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[Reader], object]] = {
    "number": lambda m: setattr(m, "number", 2.0),
    "attribute of the class": lambda _: setattr(Reader, "of_class", 2.0),
    "item of a list in a dict": lambda m: m.table["a"].__setitem__(0, 2.0),
    "field of an object": lambda m: setattr(m.config.inner, "t", 2.0),
    "another tensor": lambda m: setattr(m, "tensor", torch.tensor(2.0)),
    "a tensor's value": lambda m: m.tensor.fill_(2.0),
    "attribute that was not there": lambda m: setattr(m, "bonus", 2.0),
    "attribute of a block in nested containers": lambda m: setattr(m.nested.h[0], "scale", 2.0),
    "attribute that a block gets": lambda m: setattr(m.tower.layers[0], "left_out", True),
    "hook on the model": lambda m: m.register_forward_hook(doubled),
    "forward of the model": patch_forward,
    "attribute that a method of a block reads": lambda m: setattr(m.blocks[1], "strength", 2.0),
    "array": lambda m: m.array.fill(2.0),
    "module without parameters": lambda m: setattr(m.blocks[1].linear, "extra", nn.Identity()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_counts_from_the_next_step_on(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Reader, "of_class", 1.0)  # and put back
    reader, plain = model(), model()
    with penstock.pipeline(reader, (batches()[0][0],), ranks=2, microbatches=2, loss=squared_error) as pipe:
        pipe.step(*batches()[0][:1], target=batches()[0][1])
        for each in (reader, plain):
            CHANGES[name](each)
        assert_steps_by_hand(pipe, plain, batches(), squared_error, 2)


def test_dropout_that_is_switched_on_later_draws_alike_for_any_number_of_ranks() -> None:
    def change(reader: Reader, step: int) -> None:
        for block in reader.blocks:
            block.rate = 0.5 * (step > 0)

    one, three = outputs(1, change), outputs(3, change)
    assert all(map(torch.equal, one, three))
    assert (one[2] == 0).any()


def test_fields_of_an_input_count() -> None:
    reader, options, (x, y) = model(), SimpleNamespace(t=1.0), batches()[0]
    with penstock.pipeline(reader, (x, options), ranks=2, microbatches=2, loss=squared_error) as pipe:
        for options.t in (1.0, 3.0, 1.0):
            got = torch.cat(list(pipe.step(x, options, target=y, outputs=True).outputs))
            assert torch.equal(got, torch.cat([reader(row.clone(), options) for row in x.split(2)]))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.blocks.__setitem__(1, Block()), "'blocks.1.linear.weight' is new"),
        (
            lambda m: setattr(m.blocks[1].linear, "weight", nn.Parameter(torch.eye(5))),
            "'blocks.1.linear.weight' is new",
        ),
        (lambda m: m.blocks.__delitem__(2), "'blocks.2.linear.weight' is gone"),
    ],
)
def test_other_parameters_are_refused(change: Callable[[Reader], object], words: str) -> None:
    reader, (x, y) = model(), batches()[0]
    with penstock.pipeline(reader, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        change(reader)
        with pytest.raises(ArgumentError, match=f"(?s){words}.*make a new pipeline"):
            pipe.step(x, target=y)


@dataclass(slots=True)
class Slots:
    value: float = 1.0

    def once(self) -> float:
        return self.value

    def thrice(self) -> float:
        return 3 * self.value


def set_value(held: Slots) -> Slots:
    held.value = 3.0
    return held


HELD: dict[str, tuple[Callable[[], Any], Callable[[Any], Any], Callable[[Any], float]]] = {
    "a set": (lambda: {0, 1}, lambda held: held.discard(0) or held, lambda held: 1.0 if 0 in held else 3.0),
    "slots": (Slots, set_value, Slots.once),
    "a partial": (lambda: partial(float, 1.0), lambda _: partial(float, 3.0), lambda held: held()),
    "a bound method": (lambda: Slots().once, lambda held: held.__self__.thrice, lambda held: held()),
    "a sign of zero": (lambda: 0.0, lambda _: -0.0, lambda held: 1.0 if math.copysign(1, held) > 0 else 3.0),
}


@pytest.mark.parametrize("name", HELD)
def test_what_an_attribute_holds_may_change(name: str) -> None:
    make, change, read = HELD[name]

    def reads(self: Any, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.read(self.held)
        return x

    torch.manual_seed(0)
    one = Forward(reads, layers=nn.ModuleList(nn.Linear(5, 5) for _ in range(2)), held=make(), read=read)
    with penstock.pipeline(one, (batches()[0][0],), ranks=2, microbatches=2, loss=squared_error) as pipe:
        pipe.step(batches()[0][0], target=batches()[0][1])
        one.held = change(one.held)
        assert read(one.held) == 3.0
        twin = deepcopy(one)
        twin.held = one.held
        assert_steps_by_hand(pipe, twin, batches(), squared_error, 2)


def test_an_empty_place_among_layers_is_no_change() -> None:
    """x-transformers keeps `[norm before, norm between, norm after]` for each layer, with None where there is none."""
    reader, (x, y) = model(), batches()[0]
    reader.norms = nn.ModuleList([nn.LayerNorm(5), None])  # type: ignore[list-item]
    with penstock.pipeline(reader, (x,), loss=squared_error, ranks=2, microbatches=2) as pipe:
        for _ in range(3):
            pipe.step(x, target=y)
        assert len(list(pipe.session.bound_schedules)) == 1


def test_objects_that_take_the_place_of_others_in_memory_are_told_apart() -> None:
    reader, seen = model(), set()
    assumptions = Assumptions({"": reader})
    for value in range(20):
        reader.tensor = torch.tensor(float(value))  # often where the one before it was
        seen.add(assumptions.read())
    assert len(seen) == 20


class Counting(Block):
    """Counts its own calls, in an object that its parent reads from, too."""

    def forward(self, x: Tensor) -> Tensor:
        self.shared.calls += 1
        self.calls = getattr(self, "calls", 0) + 1
        return super().forward(x)


def test_what_blocks_change_themselves_is_no_reason_to_record(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, (x, y) = model(), batches()[0]
    reader.blocks[1] = Counting()
    reader.blocks[1].shared = reader.config
    reader.config.calls = 1
    recorded: list[object] = []
    from penstock.partition import partitioner

    original = partitioner.record
    monkeypatch.setattr(
        partitioner, "record", lambda *args, **options: recorded.append(args) or original(*args, **options)
    )
    with penstock.pipeline(reader, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        before = len(recorded)
        for _ in range(3):
            pipe.step(x, target=y)
    assert len(recorded) == before
