"""Figures of training steps for TensorBoard: loss, gradient norm, bubble, time, rates. Needs `penstock[tensorboard]`.

`torch.utils.tensorboard` does the writing.
"""

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
    """Writes the figures of each step into a folder that `tensorboard --logdir` reads.

    One rank makes it, any that has the loss; it starts no communication, so that the others need not know of it.

        writer = StepWriter("runs/gpt") if pipe.is_first else None
        ...
        if writer:
            writer.add(pipe.step_count, result, rows=len(x), gradient_norm=norm)

    Args:
        folder: for the event files; created if missing.
        clock: gives seconds.

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
        """Writes one step, to be called once it is over. Waits for the loss.

        `time/step` is in seconds, from the call before: the first step has none, nor rates. `bubble` is there for steps
        with a timeline, unless one process runs all ranks.

        Args:
            step: its number.
            result: what `Pipeline.step` gave.
            rows, tokens: of the whole batch, for rates a second.
            gradient_norm: what `Pipeline.clip_grad_norm_` gave.
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
