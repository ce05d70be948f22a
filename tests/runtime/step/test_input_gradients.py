"""The gradients of inputs are those of one device: cut, summed and put where the caller's tensor came from.

Real ranks do the same in tests/distributed/test_changing.py.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import Microbatch, Microbatches, pipeline, verify
from scaffolding.by_hand import sizes_by_hand
from scaffolding.models import Layers, squared_error

MICROBATCHES = 4


class Skipping(Layers):
    """Uses its inputs on every stage, one of them whole in each microbatch."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden * scale).relu() + x
        return hidden


def batch(rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    x, y = torch.randn(rows, 5, generator=generator), torch.randn(rows, 5, generator=generator)
    return x.requires_grad_(), torch.tensor(1.5, requires_grad=True), y


def by_hand(model: nn.Module, x: Tensor, scale: Tensor, y: Tensor) -> None:
    sizes = sizes_by_hand(len(x), MICROBATCHES)
    for part, target in zip(x.split(sizes), y.split(sizes), strict=True):
        squared_error(model(part.clone(), scale), target).backward(torch.tensor(len(part) / len(x)))


@pytest.mark.parametrize(
    ("schedule", "frozen", "options"),
    [
        ("1f1b", True, {}),
        ("zb-h1", True, {}),
        ("zb-v", False, {"stages_per_rank": 2}),
        ("chimera", False, {}),
        ("gpipe", True, {"recompute": "always"}),
    ],
)
def test_gradients_of_inputs_have_the_bits_of_one_device(schedule: str, frozen: bool, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Skipping(5, 4)
    for layer in model.layers[: 4 * frozen]:  # then nothing else takes a gradient
        layer.requires_grad_(False)
    x, scale, y = batch()
    x.grad = torch.ones_like(x)
    given: dict[str, Any] = {"loss_fn": squared_error, "ranks": 2, "microbatches": MICROBATCHES, "schedule": schedule}
    given |= options
    report = verify(model, (x,), {"scale": scale}, target=y, **given).raise_if_failed()
    rows = {row.name: row for row in report.rows if row.kind == "gradient"}
    for name in ("input args[0]", "input kwargs['scale']"):
        assert (rows[name].verdict, rows[name].stages[0]) == ("equal", 0)
        assert rows[name].max_reference > 0
    assert torch.equal(x.grad, torch.ones_like(x))
    assert scale.grad is None
    with pipeline(model, (x, scale) if frozen else (x.detach(), scale.detach()), **given) as pipe:
        x.grad = None
        for _ in range(2):
            pipe.step(x, scale, target=y)
        before = x.grad
        by_hand(copy.deepcopy(model), (other := batch())[0], other[1], y)
        assert before is not None
        torch.testing.assert_close(before, 2 * other[0].grad)  # type: ignore[operator]
        before = before.clone()
        pipe.evaluate(x, scale, target=y)
        pipe.predict(x, scale)
        if not frozen:
            pipe.step(x.detach(), scale.detach(), target=y)
        assert torch.equal(x.grad, before)  # type: ignore[arg-type]  # one that requires none gets none


def test_a_gradient_goes_on_to_what_made_the_input() -> None:
    torch.manual_seed(0)
    model, encoder = Skipping(5, 4), nn.Linear(5, 5)
    reference, other = copy.deepcopy(model), copy.deepcopy(encoder)
    x, scale, y = batch()
    with pipeline(
        model, (x.detach(), scale.detach()), loss_fn=squared_error, ranks=2, microbatches=MICROBATCHES
    ) as pipe:
        pipe.step(encoder(x.detach()), scale.detach(), target=y)
    squared_error(reference(other(x.detach()), scale.detach()), y).backward()
    torch.testing.assert_close(encoder.weight.grad, other.weight.grad)


def test_pieces_get_theirs() -> None:
    torch.manual_seed(0)
    model = Skipping(5, 4)
    x, scale, y = batch()
    other_x, *_ = batch()
    by_hand(copy.deepcopy(model), other_x, scale.detach(), y)
    sizes = sizes_by_hand(7, MICROBATCHES)
    options: dict[str, Any] = {"loss_fn": squared_error, "ranks": 2, "microbatches": MICROBATCHES}
    pieces = [part.clone().detach().requires_grad_() for part in x.split(sizes)]
    args = (Microbatches(pieces), scale.detach())
    with pipeline(copy.deepcopy(model).requires_grad_(False), args, **options) as pipe:
        pipe.step(*args, target=y)  # without the warning that nothing trains
    assert torch.equal(torch.cat([piece.grad for piece in pieces]), other_x.grad)  # type: ignore[arg-type, misc]

    def cut(args: Any, kwargs: Any, target: Any, microbatches: int) -> list[Microbatch]:
        parts = zip(args[0].split(sizes), y.split(sizes), strict=True)
        return [Microbatch((part, args[1]), target=target) for part, target in parts]

    with pipeline(model, (x, scale.detach()), **options, split_fn=cut) as pipe:
        pipe.step(x, scale.detach(), target=y)
    assert torch.equal(x.grad, other_x.grad)  # type: ignore[arg-type]
