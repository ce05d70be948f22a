"""A plan is followed by real processes: an order that was searched for, recomputation and offload by stage, and ranks
on the processes that it names; the bits are those of one process.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import penstock
from penstock.costs import ModelFingerprint
from penstock.plan import ParallelConfig, Plan
from penstock.schedule import generate
from penstock.simulate import LinkCost, StageCost
from penstock.simulate.search import search
from scaffolding.everything import everything_goes
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.small import batch, mlp

pytestmark = pytest.mark.distributed


def made_for() -> ModelFingerprint:
    return ModelFingerprint({name: tuple(p.shape) for name, p in mlp().named_parameters()}, "cpu", "float32")


@everything_goes
def gradients(rank: int, plan: Plan) -> tuple[list[float], dict[str, Tensor], int | None]:
    """The losses, the gradients that this rank holds after three steps, and its rank in the pipeline."""
    x, y = batch()
    with penstock.pipeline(mlp(), (x,), loss_fn=squared_error, plan=plan) as pipe:
        losses = [float(pipe.step(x * (1 + step), target=y).loss) for step in range(3)]
        held = {name: p.grad.clone() for name, p in pipe.named_parameters() if p.grad is not None}
        return losses, held, pipe.session.engine.world.rank


def _found() -> Plan:
    """For two ranks with two stages each, in an order without a name."""
    placement = generate("interleaved-1f1b", 2, 4).placement
    costs = [StageCost(3, 2, 1), StageCost(1, 1, 1), StageCost(1, 2, 2), StageCost(2, 1, 1)]
    order = search(placement, 4, costs, LinkCost(2.0), seconds=0.2).schedule
    return Plan(
        ParallelConfig(1, 2, 2, "search", 4, 3), ("1", "3", "4"), (0,), (1.0,) * 4, 9.0, 0.0, {}, (1.0,) * 2,
        (2.0,) * 2,
        offload=(1, 3), devices=(1, 0), order=str(order), made_for=made_for(),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    long_after(1, {}, {"devices": ()}, {"order": "", "choice": ParallelConfig(1, 2, 2, "zb-v", 4, 3)}),
    ids=["all at once", "in order", "zb-v"],
)
def test_processes_follow_a_plan_to_the_bit(ranks2: Ranks, changes: dict[str, object]) -> None:
    plan = replace(_found(), **changes)  # type: ignore[arg-type]
    losses, whole, _ = gradients(0, plan)
    parts = ranks2.run(gradients, plan)
    assert [rank for _, _, rank in parts] == [*(plan.devices or (0, 1))]
    assert all(part[0] == losses for part in parts)
    together = parts[0][1] | parts[1][1]
    assert together.keys() == whole.keys()
    assert all(torch.equal(together[name], grad) for name, grad in whole.items())
