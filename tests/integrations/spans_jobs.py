"""A timed step, as ranks of a pool run it."""

from __future__ import annotations

from torch.nn.functional import mse_loss

import penstock
from penstock.schedule.timeline import Timeline
from scaffolding import small


def timed_step(rank: int) -> Timeline | None:
    """The second step: in the first, ranks agree on shapes."""
    x, y = small.batch()
    with penstock.pipeline(small.mlp(), (x,), microbatches=4, loss_fn=mse_loss) as pipe:
        pipe.step(x, target=y)
        return pipe.step(x, target=y, timeline=True).timeline
