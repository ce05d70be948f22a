"""What a step gives back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ArgumentError
from penstock.timeline import Timeline

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SharedLoss:
    """A batch's loss on its way to every rank. Reading it waits, and starts nothing.

    Carries the value as float64, which holds every smaller float exactly, and its dtype.
    """

    def __init__(self, loss: Tensor | None) -> None:
        self.buffer = torch.full((2,), -1.0, dtype=torch.float64)
        if loss is not None:
            self.buffer[0] = loss.detach().double()
            self.buffer[1] = float(_DTYPES.index(loss.dtype))
        self.wait: Callable[[], None] | None = None
        """Returns when the value is here; None once it is."""

    def read(self) -> Tensor | None:
        """The loss, a scalar on the CPU; None if there is none."""
        if self.wait is not None:
            self.wait()
            self.wait = None
        value, dtype = self.buffer.tolist()
        return None if dtype < 0 else torch.tensor(value, dtype=_DTYPES[int(dtype)])


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one `step` or `evaluate` gives back.

    Attributes:
        losses: each microbatch's own loss, unweighted, in order of microbatch; on the last stage's rank, else empty.
        timeline: what every rank did when, where it was asked for.
    """

    losses: tuple[Tensor, ...] = ()
    timeline: Timeline | None = None
    _loss: SharedLoss | None = field(default=None, repr=False)
    _outputs: tuple[Any, ...] | None = field(default=None, repr=False)

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: a scalar on the CPU, the same on every rank.

        Raises:
            ArgumentError: there is none here (no loss was computed, or `share_loss=False` on another rank).
        """
        loss = None if self._loss is None else self._loss.read()
        if loss is None:
            raise ArgumentError("result.loss: there is no loss on this rank; pass loss=..., and keep share_loss=True")
        return loss

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The model's output for each microbatch, in order; on the rank of the last stage.

        Raises:
            ArgumentError: they were not asked for, or are on another rank.
        """
        if self._outputs is None:
            raise ArgumentError(
                "result.outputs: not kept; pass outputs=True, and read them where pipe.has_outputs is true"
            )
        return self._outputs
