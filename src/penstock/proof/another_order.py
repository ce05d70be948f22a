"""Which gradients a pipeline adds up in another order than the unsplit model does."""

from __future__ import annotations

from penstock.pipe.pipeline import Pipeline
from penstock.stages import ties


def reordered_in(pipe: Pipeline) -> dict[str, str]:
    """The gradients whose terms the pipeline adds up in another order than the unsplit model, and why."""
    over = "terms of several replicas, added in another order" if pipe.world.data_parallel > 1 else ""
    if not over and pipe.session.reorders_gradients:
        over = "a branch may be passed by, so that two values that cross a cut are one: terms added in another order"
    every = (
        dict.fromkeys((n for stage in pipe.stages for n in (*stage.parameters, *stage.buffers)), over) if over else {}
    )
    return every | dict.fromkeys(ties(pipe.stages), "terms of several stages, added in another order")
