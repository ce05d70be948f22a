"""What a step gives back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ArgumentError
from penstock.schedule.timeline import Timeline

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class SharedLoss:
    """A batch's loss on its way to every rank. Reading it waits, and starts nothing.

    The loss is the sum, in order, of terms from one rank or several. Each travels with its dtype, as float64, which
    holds every smaller float exactly.

    Args:
        parts: for each rank that terms come from, the terms; on other ranks, as many Nones. Not read before
            they are sent or asked for: reading waits for their device.
        divisor: what the sum is divided by, term by term.
    """

    def __init__(self, parts: Sequence[Sequence[Tensor | None]], divisor: int = 1) -> None:
        self._divisor = divisor
        self._terms = [[None if term is None else term.detach().clone() for term in terms] for terms in parts]
        self.waits: list[Callable[[], None]] = []
        """Each returns when one of the buffers is here; none is left once all are."""

    @cached_property
    def buffers(self) -> list[Tensor]:
        """For each part one row per term: the value, and 1 + the number of its dtype. All zero on ranks without the
        term, so that a sum over ranks gives the term."""
        made = [torch.zeros((len(terms), 2), dtype=torch.float64) for terms in self._terms]
        for buffer, terms in zip(made, self._terms, strict=True):
            for slot, term in zip(buffer, terms, strict=True):
                if term is not None:
                    slot[0] = term.cpu().double()
                    slot[1] = float(1 + _DTYPES.index(term.dtype))
        return made

    @property
    def is_here(self) -> bool:
        """Whether `read` waits neither for another rank nor for a device."""
        terms = (term for terms in self._terms for term in terms if term is not None)
        return not self.waits and ("buffers" in vars(self) or all(term.device.type == "cpu" for term in terms))

    def read(self) -> Tensor | None:
        """The loss, a scalar on the CPU; None if there is none."""
        while self.waits:
            self.waits.pop()()
        total: Tensor | None = None
        for value, dtype in (slot for buffer in self.buffers for slot in buffer.tolist()):
            if dtype:
                term = torch.tensor(value, dtype=_DTYPES[int(dtype) - 1]) / self._divisor
                total = term if total is None else total + term
        return total


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
        shown = "under way" if self._loss is not None and not self._loss.is_here else "none here"
        if self._loss is not None and self._loss.is_here and (loss := self._loss.read()) is not None:
            shown = f"{float(loss):.6g}"
        return f"{type(self).__name__}(loss={shown}, sizes={self.sizes})"

    @property
    def loss(self) -> Tensor:
        """The loss of the whole batch: a scalar on the CPU, the same on every rank.

        Raises:
            ArgumentError: there is none here (no loss was computed, or `share_loss=False` on another rank).
        """
        loss = None if self._loss is None else self._loss.read()
        if loss is None:
            raise ArgumentError(
                "result.loss: there is no loss on this rank; pass loss_fn=..., and keep share_loss=True"
            )
        return loss

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
