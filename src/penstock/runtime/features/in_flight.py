"""Checks parameters and buffers that a stage's forward updates although its backward uses them.

On one device a microbatch's backward finds what its own forward left. With several microbatches in flight it may find
what another one's forward wrote, and autograd does not notice if that went through `.data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor

from penstock.errors import PartitionError
from penstock.partition.values.memory import same_bits
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start
from penstock.runtime.front_end import Stage
from penstock.schedule import Action, Op


class Overwritten(Feature):
    """Checks that a stage's backward finds, bit for bit, what its forward left. A forward that runs again uses copies.

    Args:
        row: the actions of the stage's rank, in order.
    """

    @classmethod
    def of(cls, stage: StageContext) -> Overwritten | None:
        """If a forward updates what its backward uses. Raises PartitionError if comparing values could not tell."""
        if not stage.training:
            return None
        refuse_in_flight(stage.recorded, stage.row)
        return cls(stage.recorded, stage.row) if stage.recorded.overwritten else None

    def __init__(self, stage: Stage, row: Iterable[Action]) -> None:
        held = {**stage.parameters, **stage.buffers}
        self._tensors = {name: held[name] for name in stage.overwritten}
        self._last = {action.microbatch: action for action in _computations(stage, row)}
        self._left: dict[int | None, dict[str, Tensor]] = {}

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        self._left.clear()

    @contextmanager
    def around(self, action: Action) -> Iterator[None]:
        if action.op is not Op.F:
            for name, left in self._left.get(action.microbatch, {}).items():
                if not same_bits(left, self._tensors[name]):
                    raise _refusal(action.stage, repr(name))
        yield
        if action == self._last[action.microbatch]:
            self._left.pop(action.microbatch, None)

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        yield
        if not runs_again:
            self._left[microbatch] = {name: t.detach().clone() for name, t in self._tensors.items()}


def refuse_in_flight(stage: Stage, row: Iterable[Action]) -> None:
    """Refuses a stage whose forward updates remembered tensors (other than buffers) that its backward uses, if another
    microbatch's forward may run between the two.

    Args:
        row: the actions of the stage's rank, in order.

    Raises:
        PartitionError: this is such a stage.
    """
    if not stage.overwritten_strays:
        return
    mine = _computations(stage, row)
    last = {action.microbatch: place for place, action in enumerate(mine)}
    for place, action in enumerate(mine):
        others = [one for one in mine[place + 1 : last[action.microbatch]] if one.microbatch != action.microbatch]
        if any(one.op is Op.F for one in others):
            raise _refusal(stage.meta.index, stage.overwritten_strays[0])


def _computations(stage: Stage, row: Iterable[Action]) -> list[Action]:
    return [action for action in row if action.stage == stage.meta.index and action.op.is_compute]


def _refusal(stage: int, what: str) -> PartitionError:
    return PartitionError(
        f"the forward of stage {stage} updates {what} in place although its backward uses it, so that the backward of "
        "one microbatch would find what the forward of another has written. Update it after the step, let the forward "
        "use a clone of it, or choose schedule='naive' or microbatches=1"
    )
