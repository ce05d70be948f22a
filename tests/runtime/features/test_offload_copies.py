"""The copies of offload beside a computation that waits for nothing else: which are made when, and that they are right
if they are as slow as can be.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import pipeline
from penstock.schedule import Op, generate, split_backward
from runtime.features.slow_copies import SlowCopies, install
from scaffolding.everything import everything
from scaffolding.models import OneLayer, squared_error
from scaffolding.proofs import proven
from scaffolding.small import WIDTH, batch, mlp


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowCopies]:
    yield install(monkeypatch)
    gc.collect()  # what a step that raised has left


RUNS = [("zb-h1", 4, 1, "never"), ("interleaved-1f1b", 2, 2, "always"), ("dualpipe-v", 2, 2, 2)]


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "recompute"), RUNS)
def test_the_slowest_copies_are_waited_for(
    copies: SlowCopies, schedule: str, ranks: int, chunks: int, recompute: Any
) -> None:
    model, (x, y) = everything(4, norm=schedule != "dualpipe-v")[0], batch(16)
    options: dict[str, Any] = {"microbatches": 8, "offload": True, "recompute": recompute, "exact": True}
    proven(model, x, y, schedule=schedule, ranks=ranks, stages_per_rank=chunks, **options)
    copies.finish()
    assert {kind for kind, _, _ in copies.log} == {"send", "fetch"}
    assert not copies.wrong


def test_what_a_backward_needs_is_fetched_during_the_computation_before_it(copies: SlowCopies) -> None:
    model, (x, y) = mlp(8), batch(16)
    with pipeline(model, (x,), schedule="zb-h1", ranks=4, microbatches=8, loss=squared_error, offload=True) as pipe:
        for _ in range(2):
            copies.log.clear()
            pipe.step(x, target=y)
        rows = pipe.schedule.rows
    before = {}
    for row in rows:
        work = [action for action in row if action.op.is_compute]
        before.update({str(after): str(action) for action, after in pairwise(work)})
    assert copies.log
    for kind, sent_in, during in copies.log:
        if kind == "send":
            assert during == sent_in
        else:
            backward, weights = sent_in.replace("F", "I"), sent_in.replace("F", "W")
            assert during in (before[backward], before[weights])


def test_the_device_holds_what_was_just_saved_and_what_comes_next(copies: SlowCopies) -> None:
    """On the second of five ranks, where four microbatches are in flight. (The first holds the batch.)"""
    model, (x, y) = mlp(10), batch(16)
    found: list[tuple[str, set[str]]] = []
    with pipeline(model, (x,), schedule="1f1b", ranks=5, microbatches=8, loss=squared_error, offload=True) as pipe:
        pipe.step(x, target=y)
        copies.on_end = lambda action: found.append((action, {a for a in copies.alive() if a.startswith("1F")}))
        pipe.step(x, target=y)
        work = [action for action in pipe.schedule.rows[1] if action.op.is_compute]
    seen = dict(found)
    for action, following in pairwise(work):
        expected = {f"1F{action.microbatch}"} if action.op is Op.F else set()
        expected |= set() if following.op is Op.F else {f"1F{following.microbatch}"}
        assert seen[str(action)] == expected, action
    assert not seen[str(work[-1])]


class Tagged(Tensor):
    """A tensor of another class."""


class Scales(torch.autograd.Function):
    """Saves a view, an output and an integer tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * 2
        ctx.save_for_backward(x[:, ::2], result, torch.arange(3))
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        view, result, numbers = ctx.saved_tensors
        assert not view.is_contiguous()
        return grads[0] * 2 + result * 0.5 * numbers.sum() + view.sum()


class Odd(nn.Module):
    """Saves tensors of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(1))
        self.table = torch.linspace(0.5, 1, WIDTH)  # neither parameter nor buffer: all microbatches share it

    def forward(self, x: Tensor) -> Tensor:
        a = self.linear(x)
        a = a * a[:, :1].expand_as(a) * self.scale.expand_as(a)
        a = a * a.mean() + (a[:, 1:8:3] * a[:, 0:7:3]).sum()
        low = a.bfloat16()
        a = a + (low * low.sin()).float() + a.gather(1, a.argmax(1, keepdim=True))
        number = torch.complex(a, a * 2)
        a = a + (number * number.conj()).real + (a.t() @ a).sum() * self.table
        tagged = a.as_subclass(Tagged)
        a = (tagged * tagged).as_subclass(Tensor)
        return torch.tanh(Scales.apply(a))  # type: ignore[no-untyped-call]


class Sloped(nn.Module):
    """Takes a gradient in its own forward, through what the forward has saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(torch.tanh(self.first(x)).square().sum(), x, create_graph=True)
        return torch.tanh(self.second(slope + x))


@pytest.mark.parametrize("kind", [Odd, Sloped])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_tensors_of_all_kinds_come_back(copies: SlowCopies, kind: type[nn.Module], split: bool) -> None:
    torch.manual_seed(0)
    order = generate("gpipe", 2, 6)
    x, y = batch(12)
    options: dict[str, Any] = {"microbatches": 6, "offload": True, "exact": True}
    proven([kind(), kind()], x, y, schedule=split_backward(order) if split else order, ranks=2, **options)
    copies.finish()
    assert copies.log
    assert not copies.wrong


@pytest.mark.parametrize("offload", [False, True])
def test_a_parameter_updated_before_its_backward_is_refused(copies: SlowCopies, offload: bool) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
    x, y = batch(12)
    with pipeline(layers, (x,), schedule="gpipe", ranks=2, microbatches=6, loss=squared_error, offload=offload) as pipe:
        pipe.step(x, target=y)

        def update(*_: Any) -> None:
            with torch.no_grad():
                layers[1].weight.mul_(1.5)

        layers[1].register_forward_hook(update)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            pipe.step(x, target=y)


class UpdatesInput(OneLayer):
    """Updates what it receives."""

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(1)
        return torch.tanh(self.layer(x))


def test_an_input_that_a_recomputed_stage_updates_is_sent_as_it_was(copies: SlowCopies) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), *(nn.Sequential(UpdatesInput(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(3))]
    x, y = batch(16)
    options: Any = {"microbatches": 8, "cuts": ["1", "2", "3"], "offload": True, "recompute": "always", "exact": True}
    proven(layers, x, y, schedule="1f1b", ranks=4, **options)
    assert copies.log
    copies.finish()
    assert not copies.wrong


def test_what_would_come_back_too_soon_stays_and_is_noted(copies: SlowCopies) -> None:
    model, (x, y) = mlp(8), batch(16)
    with pipeline(model, (x,), schedule="1f1b", ranks=4, microbatches=8, loss=squared_error, offload=True) as pipe:
        pipe.step(x, target=y)
        idle, there = [note for note in pipe.notes if note.startswith("offload: ")]
    assert {sent_in[0] for _, sent_in, _ in copies.log} == {"0", "1"}
    assert "nothing goes to the host on stages 2-3, where each backward comes within 3 computations" in idle
    assert there == "offload: stages 0-1 on the CPU: the copies are made, and save no memory"
