"""Writes each step's loss, gradient norm, bubble, time and rates to TensorBoard. Needs `penstock[tensorboard]`."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from torch import Tensor

from penstock.errors import require
from penstock.pipe.result import StepResult


class StepWriter:
    """Writes each step's figures to a folder that `tensorboard --logdir` reads.

    Make it on one rank only, any that has the loss. It communicates with no one, so the others need not know of it.

        writer = StepWriter("runs/gpt") if pipe.is_first else None
        ...
        if writer:
            writer.add(pipe.step_count, result, rows=len(x), gradient_norm=norm)

    Args:
        folder: where the event files go; created if missing.
        clock: returns the time in seconds.

    Raises:
        MissingExtraError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.perf_counter) -> None:
        require("tensorboard", "tensorboard", for_what="a StepWriter")
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder))
        self._clock = clock
        self._ended: float | None = None

    def add(
        self,
        step: int,
        result: StepResult,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        gradient_norm: Tensor | float | None = None,
    ) -> None:
        """Writes one step. Call it after the step; it waits for the loss.

        `time/step` is the time in seconds since the previous call, so the first step has neither it nor rates. Steps
        with a timeline also get `bubble`, unless one process runs all ranks.

        Args:
            step: the step's number.
            result: what `Pipeline.step` returned.
            rows, tokens: their number in the whole batch, for rates per second.
            gradient_norm: what `Pipeline.clip_grad_norm_` returned.
        """
        figures: dict[str, float] = {"loss": float(result.loss)}
        if gradient_norm is not None:
            figures["gradient_norm"] = float(gradient_norm)
        if result.timeline is not None and not result.timeline.in_turns:
            figures["bubble"] = result.timeline.bubble_rate
        now = self._clock()
        if self._ended is not None:
            seconds = figures["time/step"] = now - self._ended
            rates = {"rows": rows, "tokens": tokens}
            figures |= {f"rate/{name}": count / seconds for name, count in rates.items() if count is not None}
        self._ended = now
        for name, figure in figures.items():
            self._events.add_scalar(name, figure, step)

    def close(self) -> None:
        """Writes what is still buffered."""
        self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
