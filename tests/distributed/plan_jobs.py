"""What ranks run for `test_plan_ranks`: steps by a plan, on its own order of the processes."""

from __future__ import annotations

from torch import Tensor

import penstock
from penstock.costs import ModelFingerprint
from penstock.plan import Plan
from scaffolding.everything import everything_goes
from scaffolding.models import squared_error
from scaffolding.small import batch, mlp


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
