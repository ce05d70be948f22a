"""Parameters that several ranks hold: they start equal, and exactly those ranks sum their gradients.

A group consists of the parameters that the same set of stages holds.

Hooks on the gradient of a parameter that several stages hold are refused. In plain torch a hook is called once per
backward, with the sum over all uses of the parameter, or with what has been accumulated so far. Here each stage has its
own backward, and so only part of that sum; in bidirectional schedules each copy of a stage accumulates the gradients of
its own microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from torch import nn

from penstock._base.compat import has_accumulation_hooks, has_gradient_hooks
from penstock._base.errors import PartitionError
from penstock._base.stages import ties, ties_across_ranks
from penstock.distributed.failure import Position
from penstock.runtime.front_end import Stage
from penstock.runtime.gradients.sums import GradientSum
from penstock.runtime.transport.protocol import Transport


@dataclass(frozen=True, slots=True)
class TieGroup:
    """Parameters, by canonical name, that live on exactly these stages, and the ranks that hold the stages."""

    names: tuple[str, ...]
    stages: tuple[int, ...]
    ranks: tuple[int, ...]


def tie_groups(ties: Mapping[str, Sequence[int]], rank_of: Sequence[int]) -> tuple[TieGroup, ...]:
    """The groups that span several ranks, in the order in which every rank reduces them."""
    return tuple(
        TieGroup(tuple(names), stages, tuple(sorted({rank_of[stage] for stage in stages})))
        for stages, names in ties_across_ranks(ties, rank_of).items()
    )


class TieReducer(GradientSum):
    """One rank's part in the reduction of a group: the sum of its parameters' gradients.

    Args:
        numbers: the ranks' numbers in messages.
    """

    def __init__(
        self,
        index: int,
        group: TieGroup,
        parameters: Sequence[nn.Parameter],
        transport: Transport,
        numbers: Sequence[int],
    ) -> None:
        super().__init__(parameters, partial(transport.reduce, index, group.ranks))
        self._is_first = transport.rank == group.ranks[0]
        peers = tuple(numbers[rank] for rank in group.ranks if rank != transport.rank)
        self.position = Position(f"REDUCE_GRAD{index}", peers)
        """The rank's position while it waits for the sum."""

    def start_equal(self) -> None:
        """Starts to copy the first rank's parameters to the others: a sum in which the others contribute zeros."""
        for parameter in self.parameters:
            if not self._is_first:
                parameter.data.zero_()
        self._pending = self._reduce([parameter.data for parameter in self.parameters])

    def end_equal(self) -> None:
        """Waits for the copies."""
        assert self._pending is not None
        self._pending.wait()
        self._pending = None


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
