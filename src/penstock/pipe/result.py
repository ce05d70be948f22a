"""What a step gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.runtime.step.results import SharedLoss
from penstock.schedule.timeline import Timeline


@dataclass(frozen=True, slots=True, repr=False)
class StepResult:
    """What one `step` or `evaluate` gives back. Printing it shows the loss only if that takes no waiting.

    Attributes:
        losses: each microbatch's own loss, unweighted, in order of microbatch; empty except on the last stage's rank.
        timeline: what every rank did when, if it was asked for.
        sizes: the rows of each microbatch; on every rank.
    """

    losses: tuple[Tensor, ...] = ()
    timeline: Timeline | None = None
    sizes: tuple[int, ...] = ()
    _loss: SharedLoss | None = field(default=None, repr=False)
    _outputs: tuple[Any, ...] | None = field(default=None, repr=False)

    def __repr__(self) -> str:
        loss_text = "under way" if self._loss is not None and not self._loss.is_ready else "none here"
        if self._loss is not None and self._loss.is_ready and (loss := self._loss.read()) is not None:
            loss_text = f"{float(loss):.6g}"
        return f"{type(self).__name__}(loss={loss_text}, sizes={self.sizes})"

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: a scalar on the CPU, the same on every rank.

        Raises:
            ArgumentError: there is none here (no loss was computed, or `broadcast_loss=False` on another rank).
        """
        loss = None if self._loss is None else self._loss.read()
        if loss is None:
            raise ArgumentError(
                "result.loss: there is no loss on this rank; pass loss_fn=..., and keep broadcast_loss=True"
            )
        return loss

    @property
    def parts(self) -> dict[str, Tensor]:
        """What else the loss function returned, by name, or the scalars in the output of a model that computes its own
        loss: averaged like the loss, and where that is. See docs/guides/batches.md.
        """
        return {} if self._loss is None else self._loss.read_parts()

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The model's output for each microbatch, in order; on the rank of the last stage, or the ranks that asked.

        A schedule with two copies of the model has two last stages; with `outputs=True` each one's rank has None for
        the other's.

        Raises:
            ArgumentError: they were not asked for, or are on another rank.
        """
        if self._outputs is None:
            raise ArgumentError(
                "result.outputs: not kept here; pass outputs=True, and read them where pipe.has_outputs is true, or "
                "outputs='all', or the number of the rank that is to have them"
            )
        return self._outputs
