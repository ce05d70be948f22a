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
from scaffolding.by_hand import assert_same_gradients, assert_steps_by_hand, step_by_hand
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


@pytest.mark.parametrize(
    ("schedule", "count", "rows"), [("1f1b", 2, 8), ("1f1b", 2, 7), ("zb-h1", 2, 8), ("zb-v", 4, 8)]
)
def test_ready_made_stages_train_as_the_unsplit_model_does(schedule: str, count: int, rows: int) -> None:
    """Of 7 rows, the last microbatch gets one, and a partition of its own."""
    modules = stages(count)
    reference, (x, y) = nn.Sequential(*deepcopy(modules)), batch()
    with made(modules, schedule) as pipe:
        assert not any(isinstance(stage.module, fx.GraphModule) for stage in pipe.session.partition.stages)
        assert_steps_by_hand(pipe, reference, [(x[:rows], y[:rows])] * 2, squared_error, MICROBATCHES)
        if schedule.startswith("zb"):
            assert max(pipe.deferred_weight_grad_fraction.values()) > 0


def trained_on(rank: int, schedule: str) -> dict[str, Tensor]:
    """The gradients of a step on one of two ranks, and its loss."""
    x, y = batch()
    with made(stages(2), schedule, World(2, rank, (0, 1))) as pipe:
        loss = pipe.step(x, target=y).loss
        return {"loss": loss, **{name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}}


@pytest.mark.distributed
def test_they_do_in_processes(ranks2: Ranks) -> None:
    first, last = ranks2.run(trained_on, "zb-h1")
    assert len(first) == len(last) == 5  # two weights, two biases and the loss
    reference, (x, y) = nn.Sequential(*stages(2)), batch()
    expected = step_by_hand(reference, (x,), y, squared_error, MICROBATCHES)
    assert torch.equal(first["loss"], expected.total)
    for name, parameter in reference.named_parameters():
        assert torch.equal((first | last)[name], parameter.grad), name  # type: ignore[arg-type]


@pytest.mark.parametrize("recompute", ["always", "except_last"])
def test_features_that_need_no_recording_work(recompute: str) -> None:
    x, y = batch()
    with made(stages(2), "1f1b", recompute=recompute) as pipe, made(stages(2), "1f1b") as plain:
        pipe.step(x, target=y)
        plain.step(x, target=y)
        assert_same_gradients(pipe.model, plain.model)


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
