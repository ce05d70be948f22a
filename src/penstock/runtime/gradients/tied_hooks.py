"""Refuses hooks on the gradient of a parameter that several stages hold.

In plain torch a hook is called once per backward, with the sum over all uses of the parameter, or with what has been
accumulated so far. Here each stage has its own backward, and so only part of that sum; in bidirectional schedules each
copy of a stage accumulates the gradients of its own microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import nn

from penstock._base.compat import has_accumulation_hooks, has_gradient_hooks
from penstock._base.stages import ties
from penstock.errors import PartitionError
from penstock.runtime.front_end import Stage


class Tied(NamedTuple):
    """A parameter that several stages hold.

    Attributes:
        name: its canonical name.
        stages: the stages that hold it.
        in_one_backward: whether a microbatch passes through several of these stages; otherwise they are copies of one.
    """

    name: str
    stages: tuple[int, ...]
    parameter: nn.Parameter
    in_one_backward: bool


def tied_among(stages: Sequence[Stage], here: Iterable[Stage], pipelines: int) -> tuple[Tied, ...]:
    """The parameters of this process's stages that several stages hold.

    Args:
        stages: all stages, pipeline by pipeline.
        here: the stages of this process.
        pipelines: how many copies of the model there are.
    """
    held = {name: parameter for stage in here for name, parameter in stage.parameters.items()}
    in_one = ties([stage.meta for stage in stages[: len(stages) // pipelines]])
    every = ties([stage.meta for stage in stages])
    return tuple(Tied(name, on, held[name], name in in_one) for name, on in every.items() if name in held)


def refuse_hooks(tied: Iterable[Tied]) -> None:
    """Raises PartitionError if one of these parameters has a hook that would see only part of its gradient."""
    for name, stages, parameter, in_one_backward in tied:
        if has_accumulation_hooks(parameter) or (in_one_backward and has_gradient_hooks(parameter)):
            raise PartitionError(
                f"parameter {name!r} has a hook on its gradient (register_hook or register_post_accumulate_grad_hook), "
                f"and is held by stages {list(stages)}: each would call the hook with its own share of the gradient, "
                "not with the sum, as plain training does. Choose cuts or a schedule so that only one stage holds it, "
                "or remove the hook and change the gradient after the step (p.grad, before optimizer.step())"
            )
