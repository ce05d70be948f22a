"""W adds products to `.grad` in place, except on the CPU, where that would change bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import penstock
from penstock.runtime.exact import rules as exact
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.runtime.split_backward.weight_gradients import notes
from penstock.schedule import generate

LAYERS, MICROBATCHES, ROWS, INTO, OUT = 4, 4, 12, 10, 14

aten = torch.ops.aten


class Products(nn.Module):
    """Products of every form, with weights of one size, one of which is used twice in a microbatch."""

    def __init__(self, *, twice: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(INTO, OUT) for _ in range(LAYERS))
        rows = [nn.Parameter(torch.randn(OUT, INTO)) for _ in range(LAYERS - 1)]
        self.back = nn.ParameterList([*rows, nn.Parameter(torch.randn(INTO, OUT).t())])  # row-major, column-major
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for layer, matrix in zip(self.layers, self.back, strict=True):
            x = torch.tanh(layer(x)) @ matrix
        return torch.tanh(self.layers[-1](x)) @ self.back[-1] if self.twice else x


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(ROWS, INTO, generator=generator), torch.randn(ROWS, INTO, generator=generator)


class Watch(TorchDispatchMode):
    """Counts the operators that make a tensor of a weight's size, and those that add a product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        shares = any(value.alias_info is not None for value in func._schema.returns)
        self.seen["in place"] += func is aten.addmm_.default
        self.seen["made"] += not shares and isinstance(made, Tensor) and made.numel() == INTO * OUT
        return made


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """What the Ws of all stages do."""
    watch, weights = Watch(), SplitBackward.weight_gradients

    def watched(self: SplitBackward, microbatch: int) -> None:
        with watch:
            weights(self, microbatch)

    monkeypatch.setattr(SplitBackward, "weight_gradients", watched)
    return watch


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device other than the CPU, where bits are not promised."""
    monkeypatch.setattr(exact, "computes_apart", lambda device: False)


def trained(model: nn.Module, *, keeps: bool = True, autocast: bool = False, **options: Any) -> dict[str, Tensor]:
    """The gradients after two steps; `keeps`: of both."""
    x, y = batch()
    options = {"ranks": 2, "schedule": "zb-h1", "microbatches": MICROBATCHES, "loss": F.mse_loss} | options
    with penstock.pipeline(model, (x,), **options) as pipe:
        for _ in range(2):
            if not keeps:
                model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                pipe.step(x, target=y)
        assert all(share > 0.5 for share in pipe.deferred_weight_grad_fraction.values())
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


WEIGHTS = 2 * LAYERS
WAITING = 2 * MICROBATCHES - 1
"""Of a weight's terms in two steps, all but the first, in which it is learned what can wait."""


def seen(watch: Watch) -> dict[str, int]:
    return {what: count for what, count in watch.seen.items() if count}


TWICE = 2
"""Of the weights, where the last two are used twice."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        pytest.param({}, {"in place": WEIGHTS * WAITING}, id="no memory for a product"),
        pytest.param(
            {"keeps": False},
            {"in place": WEIGHTS * (WAITING - 1), "made": WEIGHTS},
            id="the first product becomes the gradient",
        ),
        pytest.param(
            {"twice": True, "cuts": ["layers.1"]},
            {"in place": (WEIGHTS - TWICE) * WAITING, "made": 2 * TWICE * WAITING},
            id="the terms of one microbatch are summed first",
        ),
        pytest.param({"autocast": True}, {"made": WEIGHTS * WAITING}, id="lower precision is not cast first"),
    ],
)
def test_products_are_added_in_place(
    watch: Watch, elsewhere: None, options: dict[str, Any], expected: dict[str, int]
) -> None:
    trained(Products(twice=options.pop("twice", False)), **options)
    assert seen(watch) == expected


def test_a_hook_sees_every_term_and_the_gradients_are_those_of_one_device(watch: Watch, elsewhere: None) -> None:
    model = Products()
    terms: list[Tensor] = []
    model.layers[0].weight.register_hook(terms.append)
    found = trained(model)
    assert len(terms) == 2 * MICROBATCHES
    torch.testing.assert_close(sum(terms[1:], start=terms[0]), found["layers.0.weight"])
    assert seen(watch)["in place"] == (WEIGHTS - 1) * WAITING
    for twice, gradients in ((False, found), (True, trained(Products(twice=True), cuts=["layers.1"]))):
        expected = trained(Products(twice=twice), ranks=1, schedule="1f1b")
        assert gradients.keys() == expected.keys()
        for name, grad in gradients.items():
            assert (grad - expected[name]).abs().max() <= 1e-6 * expected[name].abs().max(), name
            assert grad.stride() == expected[name].stride()


@pytest.mark.parametrize(("devices", "schedule"), [("cpu", "zb-h1"), ("cuda", "1f1b"), ("cuda", "zb-h1")])
def test_a_note_says_where_bits_are_not_kept(devices: str, schedule: str) -> None:
    found = notes([torch.device(devices)] * 2, generate(schedule, 2, MICROBATCHES))
    assert any("in place" in note for note in found) == ((devices, schedule) == ("cuda", "zb-h1"))
