"""Runs a stage in the frame that `parallelize` was applied to, and reduces its gradients if it is sharded."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Forward, Start
from penstock.runtime.front_end import Stage
from penstock.schedule import Op

if TYPE_CHECKING:
    from penstock.runtime.features.frame import Sharded  # which imports torch's FSDP


class Framed(Feature):
    """Runs the stage's code inside its frame, with the frame's hooks."""

    @classmethod
    def of(cls, stage: StageContext) -> Framed | None:
        """If `parallelize=` was given."""
        return cls() if any(each.frame is not None for each in stage.stages) else None

    def forward_of(self, run: Forward, stage: Stage) -> Forward:
        """The frame's forward."""
        return run if stage.frame is None else partial(stage.frame, run)


class Reduced(Feature):
    """Reduces the gradients of a sharded stage in its last backward.

    Args:
        last: the microbatch of that backward; None: there is none.
    """

    @classmethod
    def of(cls, stage: StageContext) -> Reduced | None:
        """In training, if `fully_shard` was applied."""
        if not stage.training or stage.sharded is None:
            return None
        backwards = stage.microbatches(Op.B, Op.I)
        return cls(stage.sharded, backwards[-1] if backwards else None)

    def __init__(self, sharded: Sharded, last: int | None) -> None:
        self._sharded = sharded
        self._last = last
        self._reduces = True

    def begin_step(self, start: Start) -> None:
        """Notes whether this step reduces. Not every step does; see `Pipeline.no_sync`."""
        self._reduces = start.reduces

    def code(self, microbatch: int) -> AbstractContextManager[None]:
        """Clears autocast's cache: a weight that was cast for an earlier microbatch would get its gradient after the
        reduction, since in backward what was made first comes last.
        """
        torch.clear_autocast_cache()
        return nullcontext()

    def autograd(self, microbatch: int) -> AbstractContextManager[None]:
        """Reduces within the last backward."""
        return self._sharded.reducing() if self._reduces and microbatch == self._last else nullcontext()
