"""Objects that hold tensors: they cross cuts, come in and go out as what they are, whatever their class. Others are
passed on."""

from __future__ import annotations

import copy
import random
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from penstock import pipeline
from scaffolding.by_hand import assert_same_gradients
from scaffolding.models import Forward, OneLayer, llama, squared_error
from scaffolding.proofs import proven

WIDTH = 6


@dataclass
class Both:
    """What a block hands on, of any kind."""

    x: Tensor
    skip: Tensor | None = None
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    skip: Tensor | None = None
    depth: int = 0


@dataclass
class Counted:
    """Its `__init__` has an effect, and it keeps what it has computed."""

    x: Tensor
    skip: Tensor | None = None
    depth: int = 0
    made: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.made += 1
        assert self.made == 1

    @cached_property
    def doubled(self) -> Tensor:
        return self.x * 2


class Named(NamedTuple):
    x: Tensor
    skip: Tensor | None = None
    depth: int = 0


class Output(OrderedDict):  # type: ignore[type-arg]
    """As the outputs of `diffusers` and `transformers`: a dict, the items of which are attributes."""

    def __init__(self, **items: Any) -> None:
        super().__init__({k: v for k, v in items.items() if v is not None})

    def __getattr__(self, name: str) -> Any:
        if name in ("x", "skip", "depth"):
            return self.get(name)
        raise AttributeError(name)


class Registered(Output):
    """Registered as `diffusers` does: without the keys' names."""


_pytree.register_pytree_node(
    Registered,
    lambda value: (list(value.values()), list(value)),
    lambda values, keys: Registered(**dict(zip(keys, values, strict=True))),
)


class Nested:
    """Holds itself, and another value twice."""

    def __init__(self, x: Tensor, skip: Tensor | None = None, depth: int = 0) -> None:
        self.inner = self.again = Both(x, skip, depth)
        self.me, self.weak = self, weakref.ref(self)
        self.inner.owner = self  # type: ignore[attr-defined]

    @property
    def x(self) -> Tensor:
        assert self.inner is self.again
        assert self.me is self.weak() is self.inner.owner is self  # type: ignore[attr-defined]
        return self.inner.x

    skip = property(lambda self: self.again.skip)
    depth = property(lambda self: self.inner.depth)


KINDS = [Both, Frozen, Counted, Named, Output, Registered, Nested, SimpleNamespace]


class Block(nn.Module):
    """Takes and returns an object."""

    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.kind = kind

    def forward(self, given: Any) -> Any:
        x = self.linear(given.x) + (0 if given.skip is None else given.skip) + getattr(given, "doubled", 0)
        return self.kind(x=x.tanh(), skip=given.x if given.depth % 2 else None, depth=given.depth + 1)


class Blocks(nn.Module):
    def __init__(self, kind: Callable[..., Any]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(kind) for _ in range(4))

    def forward(self, given: Any) -> Any:
        for block in self.blocks:
            given = block(given)
        return given


def prove(model: nn.Module, given: Any, loss: Callable[[Any, Tensor], Tensor] | None = None) -> None:
    """Four stages train as the whole. `loss` may look at the output, too."""
    loss = loss or (lambda output, target: squared_error(output.x, target))
    twin, target = copy.deepcopy(model), torch.randn(3, WIDTH)
    with pipeline(model, (given,), loss_fn=loss, ranks=4, microbatches=1) as pipe:
        found = pipe.step(given, target=target).loss
    expected = loss(twin(given), target)
    expected.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, expected.detach())
    assert_same_gradients(model, twin)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_objects_come_in_cross_cuts_and_go_out(kind: Callable[..., Any]) -> None:
    def loss(output: Any, target: Tensor) -> Tensor:
        assert type(output) is kind
        assert (output.depth, output.skip is None) == (4, False)
        return squared_error(output.x, target)

    prove(Blocks(kind), kind(x=torch.randn(3, WIDTH), skip=None, depth=0), loss)


class Cache:
    """Grows with every block, as a key-value cache does."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []


def test_a_key_value_cache_of_transformers_crosses_cuts() -> None:
    case = llama()
    assert isinstance(case.model, nn.Module)
    twin, kwargs = copy.deepcopy(case.model), {**case.kwargs, "use_cache": True}

    def loss(output: Any) -> Tensor:
        assert type(output.past_key_values).__name__ == "DynamicCache"
        made: Tensor = output.loss
        return made

    with pipeline(case.model, (), kwargs, loss_fn=loss, ranks=3, microbatches=1) as pipe:
        found = pipe.step(**kwargs).loss
    expected = loss(twin(**kwargs))
    expected.backward()  # type: ignore[no-untyped-call]
    assert torch.equal(found, expected.detach())
    assert_same_gradients(case.model, twin, but=["model.embed_tokens.weight"])


def test_two_arguments_that_share_an_object_share_it_on_every_stage() -> None:
    class Sharing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, cache: Cache, holder: SimpleNamespace) -> Tensor:
            cache.keys.append(self.linear(x))
            return x + holder.caches[0].keys[-1]

    def forward(self: Any, x: Tensor) -> Any:
        cache = Cache()
        holder = SimpleNamespace(caches=[cache])
        for block in self.blocks:
            x = block(x, cache, holder)
        return SimpleNamespace(x=x)

    prove(Forward(forward, blocks=nn.ModuleList(Sharing() for _ in range(4))), torch.randn(3, WIDTH))


class Experts(OneLayer):
    """Runs once for real when it is recorded, and leaves its auxiliary loss in what it is given."""

    def forward(self, x: Tensor, losses: Any) -> Tensor:
        rows = (x.sum(1) > 0).nonzero()[:, 0]
        x = x.index_add(0, rows, self.layer(x[rows]))
        (losses if isinstance(losses, list) else losses.inner["losses"]).append(x.square().mean())
        return x


@pytest.mark.parametrize("make", [list, lambda: SimpleNamespace(inner={"losses": []}, depth=0)])
def test_blocks_that_run_for_real_may_leave_values_too(make: Callable[[], Any]) -> None:
    def forward(self: Any, x: Tensor) -> Any:
        losses = make()
        for block in self.blocks:
            x = block(x, losses)
        return SimpleNamespace(x=x + sum(losses if isinstance(losses, list) else losses.inner["losses"]))

    prove(Forward(forward, blocks=nn.ModuleList(Experts(WIDTH) for _ in range(4))), torch.randn(3, WIDTH))


class Closing:
    """No stage makes such an object anew: it cleans up after itself."""

    def __init__(self) -> None:
        self.count = 0.0

    def __del__(self) -> None:
        pass


def reads(given: Any) -> float:
    places, table, generator, *others = given["all"]
    return float(len(places) + table.sum() + isinstance(generator, random.Random) + sum(one.count for one in others))


class Reading(nn.Linear):
    def forward(self, x: Tensor, given: Any) -> Tensor:  # type: ignore[override]
        return x + torch.tanh(super().forward(x)) * reads(given)


def test_what_a_stage_cannot_make_anew_is_passed_on_to_be_read() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        given = {"all": ({1, 2}, np.ones(2), random.Random(0), Closing())}
        for block in self.blocks:
            x = block(x, given)
        return x

    torch.manual_seed(0)
    model = Forward(forward, blocks=nn.ModuleList(Reading(WIDTH, WIDTH) for _ in range(2)))
    proven(model, torch.randn(4, WIDTH), torch.randn(4, WIDTH), ranks=2, microbatches=2, schedule="gpipe")
