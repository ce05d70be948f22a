"""Blocks that talk behind the model's back, and modules among a call's constants: equal, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, inspect
from penstock.partition import Partitioner
from penstock.partition.record import attempts
from penstock.partition.stages import partition
from scaffolding.models import Forward
from scaffolding.proofs import proven

WIDTH = 6


class Block(nn.Module):
    """`leave(self, h)` and `take(self)` are its ways behind the model's back."""

    def __init__(self, leave: Callable[[Any, Tensor], None], take: Callable[[Any], Tensor]) -> None:
        super().__init__()
        self.layer, self.leave, self.take = nn.Linear(WIDTH, WIDTH), leave, take

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.layer(x)) + self.take(self)
        self.leave(self, h)
        return h * 2


class Talking(nn.Module):
    """Each of its blocks adds what the one before it has left somewhere."""

    def __init__(
        self, leave: Callable[[Any, Tensor], None], take: Callable[[Any], Tensor], first: Any = lambda self, x: None
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(leave, take) for _ in range(4))
        self.first = first
        context = SimpleNamespace()
        for block in self.blocks:
            block.context, block.others = context, [*self.blocks]

    def forward(self, x: Tensor) -> Tensor:
        self.first(self, x)
        for block in self.blocks:
            x = block(x)
        return x


def by_attribute() -> nn.Module:
    def leave(self: Any, h: Tensor) -> None:
        self.hidden = h * 3

    def take(self: Any) -> Tensor:
        index = self.others.index(self)
        return self.others[index - 1].hidden if index else torch.zeros(())

    return Talking(leave, take)


def by_context() -> nn.Module:
    def leave(self: Any, h: Tensor) -> None:
        self.context.hidden = (self.context.hidden + h).detach()  # no gradient comes back by this way

    def first(self: Any, x: Tensor) -> None:
        self.blocks[0].context.hidden = x.detach().exp()

    return Talking(leave, lambda self: self.context.hidden, first)


def hook(module: Any, args: Any, result: Tensor) -> None:
    module.hooked = result.exp()


def by_hook() -> nn.Module:
    def take(self: Any) -> Tensor:
        return self.others[max(0, self.others.index(self) - 1)].layer.hooked

    model = Talking(lambda self, h: None, take)
    for block in model.blocks:
        block.layer.register_forward_hook(hook)
    return model


def by_weight() -> nn.Module:
    """Each block uses the weight of the block before it."""

    def take(self: Any) -> Tensor:
        return self.others[self.others.index(self) - 1].layer.weight.sum(0)

    return Talking(lambda self, h: None, take)


KINDS = [by_attribute, by_context, by_hook, by_weight]


def prove(model: nn.Module, **options: Any) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    proven(model, x, y, microbatches=4, exact=True, **options)


@pytest.mark.parametrize("make", KINDS)
def test_blocks_that_talk(make: Callable[[], nn.Module]) -> None:
    prove(make(), ranks=4, schedule="1f1b")


def test_what_must_stay_whole_is_refused_with_both_places() -> None:
    with pytest.raises(PartitionError) as caught:
        inspect(by_attribute(), (torch.randn(5, WIDTH),), leaf_modules=["blocks.0", "blocks.1"])
    assert "module 'blocks.1' (" in str(caught.value)
    assert "made in module 'blocks.0' (" in str(caught.value)
    assert "leave ['blocks.0', 'blocks.1'] out of leaf_modules" in str(caught.value)


class Twice(torch.autograd.Function):
    """Layers that it takes as constants; what it needs in backward it makes again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        with torch.no_grad():
            for layer in layers:
                x = layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = x
            for layer in ctx.layers:
                y = layer(y)
        y.backward(grad)
        return x.grad, None


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x, self.layers)


class Stack(nn.Module):
    """Nothing in it is repeated, so that it is recorded call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(WIDTH, WIDTH), Reversible(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.body(self.first(x)).tanh())


def test_modules_among_a_calls_constants() -> None:
    prove(Stack(), ranks=2, schedule="1f1b")
    found = inspect(Stack(), (torch.randn(5, WIDTH),))
    assert sum(stage.parameters for stage in found.stages) == found.parameters
    assert not found.notes


def test_a_parameter_that_no_stage_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the watch on each call gone, what the whole recording must satisfy still holds it."""
    monkeypatch.setattr("penstock.partition.record.side_effects.SideEffects.check_call", lambda self, call: None)
    with pytest.raises(PartitionError, match=r"uses 'body.layers.0.weight', .*no recorded call does.*leaf_modules="):
        Partitioner(Stack(), 2, streams=None)((torch.randn(5, WIDTH),))  # type: ignore[arg-type]


def test_a_parameter_in_the_graph_that_no_stage_has_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    made = partition.build_stage

    def without_last(*args: Any) -> Any:
        stage = made(*args)
        stage.parameters.pop("last.weight", None)
        return stage

    monkeypatch.setattr(partition, "build_stage", without_last)
    with pytest.raises(PartitionError, match=r"uses 'last.weight', but"):
        inspect(Stack(), (torch.randn(5, WIDTH),))


def test_parameters_that_are_not_used_are_noted() -> None:
    model = Stack()
    model.spare = nn.ModuleList(nn.Linear(2, 2) for _ in range(5))
    (note,) = inspect(model, (torch.randn(5, WIDTH),)).notes
    assert note.startswith("the forward does not use 'spare.0.weight', ")
    assert "and 6 more" in note


def test_a_parameter_of_the_model_itself_is_refused_with_a_remedy_that_can_be_followed() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = torch.func.functional_call(layer, {"weight": layer.weight * self.scale}, (x,))
            return x

    with pytest.raises(PartitionError, match=r"uses 'scale'.*a module of its own"):
        inspect(Scaled(), (torch.randn(4, 4),), stages=2)
    within = nn.Sequential(nn.Linear(4, 4), Scaled(), nn.Linear(4, 4))  # as the message says
    assert inspect(within, (torch.randn(4, 4),), stages=2, leaf_modules=["1"])


class Gated(nn.Linear):
    """Takes its gate from an iterator, out of which a recording can't take it."""

    def forward(self, x: Tensor, gates: Any) -> Tensor:  # type: ignore[override]
        return super().forward(x) * next(gates)


def give_gates(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x, iter([x.tanh()]))
    return x


def test_blocks_that_take_what_cannot_be_taken_apart_are_opened_together() -> None:
    with mock.patch.object(attempts, "_record", wraps=attempts._record) as recorded:
        recording = attempts.record(
            Forward(give_gates, blocks=nn.ModuleList(Gated(4, 4) for _ in range(4))), (torch.randn(3, 4),), {}
        )
    assert recording.unit_spec.opened == {f"blocks.{number}" for number in range(4)}
    assert recorded.call_count == 2
