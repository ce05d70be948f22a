"""The recorded code of a stage, for features that read or rewrite it call by call."""

from __future__ import annotations

from torch import fx

from penstock.errors import ArgumentError
from penstock.runtime.front_end import Stage


def recorded_code(stage: Stage, option: str) -> fx.GraphModule:
    """The code of a recorded stage.

    Raises:
        ArgumentError: the stage is ready-made, so what it calls is unknown.
    """
    if isinstance(stage.module, fx.GraphModule):
        return stage.module
    raise ArgumentError(
        f"{option} works on the recorded calls of a stage, and stage {stage.meta.index} is a ready-made "
        f"{type(stage.module).__name__}; leave it out, or let penstock.pipeline split the model"
    )
