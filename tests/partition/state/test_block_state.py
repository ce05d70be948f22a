"""State that units share or carry over from call to call, beside parameters and buffers: kept equal, or refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_full_backward_hook

import penstock
from penstock import ArgumentError, PartitionError, inspect, pipeline, verify
from penstock.partition import Partitioner
from scaffolding.by_hand import assert_same_gradients, step_by_hand
from scaffolding.proofs import proven

WIDTH = 4
X, TARGET = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1)), torch.zeros(8, WIDTH)


class Block(nn.Module):
    """`act(self, h)` says what it returns for its activations."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], state: Any, shared: SimpleNamespace) -> None:
        super().__init__()
        self.linear, self.act, self.state, self.shared = nn.Linear(WIDTH, WIDTH), act, state(), shared

    def forward(self, x: Tensor) -> Any:
        return self.act(self, torch.tanh(self.linear(x)))


def model(act: Callable[[Any, Tensor], Tensor], state: Any = lambda: None, **shared: Any) -> Any:
    torch.manual_seed(0)
    given = SimpleNamespace(**shared)
    return nn.Sequential(*(Block(act, state, given) for _ in range(4)))


def prove(act: Callable[[Any, Tensor], Tensor], state: Any = lambda: None, **options: Any) -> None:
    given = {"ranks": 2, "microbatches": 4, "schedule": "gpipe", "full_batch": False, **options}
    proven(lambda: model(act, state), X, TARGET, exact=True, **given)


class Counting(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.state += 1
        return torch.tanh(self.linear(x)) * self.state


def remembers(self: Any, h: Any) -> Any:
    y = h if self.state is None else h + self.state
    self.state = h.detach().mean(0)
    return y


def test_what_a_unit_carries_over_is_kept_by_one_copy_alone() -> None:
    prove(remembers)
    with pytest.raises(PartitionError, match=r"0.state'.* carries something over .*2 copies"):
        prove(remembers, schedule="dualpipe")
    for recompute in ("always", 1):
        with pytest.raises(PartitionError, match=r"recompute: .*0.state'.* carries something over .*'never'"):
            prove(remembers, recompute=recompute)


def test_calls_of_a_unit_that_finds_what_it_left_stay_together() -> None:
    shared = Counting(lambda self, h: h, int, SimpleNamespace())
    made = nn.Sequential(shared, nn.Linear(WIDTH, WIDTH), shared)
    with pytest.raises(PartitionError, match=r"'0.state' carries something over .* on stages \[0, 1\]"):
        Partitioner(made, 2, ["1"], streams=None)((X,))  # type: ignore[arg-type]


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.generator = nn.Linear(WIDTH, WIDTH), torch.Generator().manual_seed(2)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.linear.weight) * torch.rand(x.shape, generator=self.generator)


def test_a_generator_of_a_units_own() -> None:
    def run(**options: Any) -> None:
        given = {"ranks": 2, "microbatches": 4, "full_batch": False, **options}
        proven(lambda: nn.Sequential(*(Draws() for _ in range(4))), X, TARGET, **given)

    run(schedule="gpipe")
    with pytest.raises(PartitionError, match=r"torch.Generator in '0' .*2 copies"):
        run(schedule="dualpipe")
    with pytest.raises(PartitionError, match=r"recompute: a torch.Generator in '0'"):
        run(recompute="always")


def only_counts(self: Any, h: Any) -> Any:
    self.state += 1
    return h


def makes_a_table(self: Any, h: Any) -> Any:
    if self.state is None:
        self.state = torch.ones_like(h[:1]) + torch.arange(WIDTH)
    return h * self.state


def looks(self: Any, h: Any) -> Any:
    self.state = h.detach()
    return h


@pytest.mark.parametrize(
    ("act", "state", "options"),
    [
        (only_counts, int, {"recompute": "always"}),
        (makes_a_table, lambda: None, {"schedule": "dualpipe"}),
        (looks, lambda: None, {"recompute": 1}),
    ],
)
def test_what_no_forward_depends_on_is_no_matter(act: Any, state: Any, options: Any) -> None:
    """Where what is carried over would be refused."""
    prove(act, state, **options)


def test_hooks_on_the_gradients_of_all_modules_are_refused() -> None:
    handle = register_module_full_backward_hook(lambda module, before, after: None)
    try:
        with pytest.raises(PartitionError, match="gradients of all modules"):
            inspect(model(lambda self, h: h), (X,), stages=2)
    finally:
        handle.remove()


class Scaled(nn.Module):
    """It reads its buffer itself; its blocks have others, of which one is a table that a block may make anew."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.register_buffer("scale", torch.ones(WIDTH))
        self.blocks[1].register_buffer("kept", torch.ones(1))
        self.blocks[1].register_buffer("table", torch.ones(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


@pytest.mark.parametrize("name", ["scale", "blocks.1.kept", "blocks.1.table"])
def test_a_buffer_that_is_replaced_between_steps_is_refused(name: str) -> None:
    made = Scaled()
    path, _, key = name.rpartition(".")
    with penstock.pipeline(made, (X,), loss=F.mse_loss, ranks=2, microbatches=2) as pipe:
        pipe.step(X, target=TARGET)
        setattr(made.get_submodule(path), key, torch.full((1,), 2.0))
        if key == "table":
            pipe.step(X, target=TARGET)
            return
        with pytest.raises(ArgumentError, match=f"buffer '{name}' has been replaced .*copy_"):
            pipe.step(X, target=TARGET)


# -- what is kept for each sample of a microbatch: the next one has others ---------------------------------------------


STEPS = 5


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
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x) + state
        return self.last(y), y.detach()


def test_state_that_is_passed_in_and_returned_trains_as_on_one_device() -> None:
    options = {"target": TARGET, "loss_fn": lambda out, y: F.mse_loss(out[0], y), "ranks": 2, "microbatches": 4}
    torch.manual_seed(0)
    verify(InModel, (X, torch.ones_like(X)), **options).raise_if_failed()


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
    options = {"ranks": 2, "microbatches": 2, "schedule": "gpipe", "full_batch": False}
    proven(lambda: between(Smooths(lambda y: y.mean((0, 1)))), x, y, **options)
