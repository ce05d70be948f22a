"""The runtime runs stages that no recorder of ours has seen, to the bit; what needs a recording is refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import penstock
from penstock._base.errors import ArgumentError, PartitionError
from penstock.distributed.world import World
from penstock.pipe.build import build
from penstock.pipe.options import Options
from penstock.schedule.lowering import resolve_order
from runtime.ready_made import ReadyMade, Returns
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks

MICROBATCHES = 4
pytestmark = pytest.mark.usefixtures("one_thread")


def stages(count: int) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 7)) for _ in range(count)]


def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(8, 7, generator=generator), torch.randn(8, 7, generator=generator)


def made(modules: list[nn.Module], schedule: str, world: World | None = None, **options: Any) -> penstock.Pipeline:
    order = resolve_order(schedule, 2, MICROBATCHES, len(modules) // 2)
    x, _ = batch()
    given = Options(loss_fn=squared_error, **options)
    return build(modules, ((x,), {}), world or World(2), order, given, front_end=ReadyMade)


def trained(modules: list[nn.Module], schedule: str, world: World | None = None) -> dict[str, Tensor]:
    """The gradients of two steps, and the last one's losses."""
    x, y = batch()
    with made(modules, schedule, world) as pipe:
        assert not any(isinstance(stage.module, fx.GraphModule) for stage in pipe.session.partition.stages)
        for _ in range(2):
            result = pipe.step(x, target=y)
        if schedule.startswith("zb"):
            assert max(pipe.deferred_weight_grad_fraction.values()) > 0
        found: dict[str, Tensor] = {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}
        return {**found, "loss": result.loss.float()}


def trained_on(rank: int, schedule: str) -> dict[str, Tensor]:
    return trained(stages(2), schedule, World(2, rank, (0, 1)))


def expected(modules: list[nn.Module]) -> dict[str, Tensor]:
    """The same of the unsplit model."""
    reference = nn.Sequential(*deepcopy(modules))
    x, y = batch()
    for _ in range(2):
        losses = []
        for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
            losses.append(squared_error(reference(one.clone()), target.clone()))
            torch.autograd.backward(losses[-1], torch.tensor(1 / MICROBATCHES))
    found: dict[str, Tensor] = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    return {**found, "loss": torch.stack(losses).detach().double().mean().float()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("schedule", "count"), [("1f1b", 2), ("zb-h1", 2), ("zb-v", 4)])
def test_ready_made_stages_train_as_the_unsplit_model_does(schedule: str, count: int) -> None:
    modules = stages(count)
    assert_equal(expected(modules), trained(modules, schedule))


def test_they_train_on_a_batch_that_is_uneven() -> None:
    """Of 7 rows, the last microbatch gets one, and a partition of its own."""
    modules = stages(2)
    reference = nn.Sequential(*deepcopy(modules))
    x, y = (tensor[:7] for tensor in batch())
    with made(modules, "1f1b") as pipe:
        loss = pipe.step(x, target=y).loss
        losses = []
        for one, target in zip(x.chunk(4), y.chunk(4), strict=True):
            losses.append(squared_error(reference(one.clone()), target.clone()))
            torch.autograd.backward(losses[-1], torch.tensor(len(one) / 7))
        torch.testing.assert_close(loss.float(), squared_error(reference(x), y))
        for mine, other in zip(pipe.parameters(), reference.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.distributed
def test_they_do_in_processes(ranks2: Ranks) -> None:
    held = ranks2.run(trained_on, "zb-h1")
    assert len(held[0]) == len(held[1]) == 5  # two weights, two biases and the loss
    assert_equal(expected(stages(2)), held[0] | held[1])


@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_features_that_need_no_recording_work(recompute: str) -> None:
    x, y = batch()
    with made(stages(2), "1f1b", recompute=recompute) as pipe, made(stages(2), "1f1b") as plain:
        pipe.step(x, target=y)
        plain.step(x, target=y)
        for mine, other in zip(pipe.parameters(), plain.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"recompute": 1}, {"check_finite": True}, {"parallelize": print}], ids=str)
def test_what_needs_a_recording_is_refused(options: dict[str, Any]) -> None:
    x, y = batch()
    wanted = f"{next(iter(options))}=.* works on the recorded calls of a stage, and stage 0 is a ready-made Returns"
    with pytest.raises(ArgumentError, match=wanted), made(stages(2), "1f1b", **options) as pipe:
        pipe.step(x, target=y)


def test_a_stage_that_returns_no_tuple_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tensor's rows would pass for its outputs."""
    monkeypatch.setattr(Returns, "forward", lambda self, x: self.inner(x))
    x, y = batch()
    with made(stages(2), "1f1b") as pipe, pytest.raises(PartitionError, match=r"stage 0 returned 2 values .* of 1: y0"):
        pipe.step(x, target=y)
