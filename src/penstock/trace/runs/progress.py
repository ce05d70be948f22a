"""Progress of a run, its speed and its remaining time: the same for the terminal, `top` and pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from penstock._base.formatting import short_duration
from penstock.trace.runs.records import StepRecord, with_text_loss

RECENT = 20
"""Steps whose median is the speed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        step: the number of the last step, counted from 1.
        total_steps: how many there will be, if known.
        loss: of the last step that has one.
        seconds: from one step's end to the next, the median of the last; None after a single step.
        rows_per_second: of the batch, over all replicas.
        bubble: of the last step that was timed.
        left_seconds: until the last step; None if the number of steps is unknown.
    """

    step: int
    total_steps: int | None
    loss: float | None
    seconds: float | None
    rows_per_second: float | None
    bubble: float | None
    left_seconds: float | None

    @classmethod
    def of(cls, steps: Sequence[StepRecord], total_steps: int | None = None) -> Progress | None:
        """Compute the progress from the steps so far; None if there are none."""
        if not steps:
            return None
        last = steps[-1]
        # From the end of each step to that of the next: with the optimizer and all else in the loop.
        gaps = [after.at_seconds - before.at_seconds for before, after in pairwise(steps[-RECENT - 1 :])]
        seconds = median(gaps) if gaps else None
        remaining = None
        if seconds is not None and total_steps is not None:
            remaining = max(0, total_steps - last.step) * seconds
        return cls(
            last.step,
            total_steps,
            next((record.loss for record in reversed(steps) if record.loss is not None), None),
            seconds,
            median(record.rows for record in steps[-RECENT:]) / seconds if seconds else None,
            next((record.bubble for record in reversed(steps) if record.bubble is not None), None),
            remaining,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON, which has no number for a loss that is none: that is text."""
        return with_text_loss(asdict(self))

    def __str__(self) -> str:
        """`step 120 of 1,000, loss 2.3412, 812 samples/s, bubble 18%, 5 min left`."""
        return self.format()

    def format(self, *, over: bool = False) -> str:
        """Format the progress; of a run that is over, without the remaining time."""
        of = "" if self.total_steps is None else f" of {self.total_steps:,}"
        parts = [f"step {self.step:,}{of}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}" if 1e-3 <= abs(self.loss) < 1e5 else f"loss {self.loss:.4g}")
        if self.rows_per_second is not None:
            speed = f"{self.rows_per_second:,.0f}" if self.rows_per_second >= 100 else f"{self.rows_per_second:.3g}"
            parts.append(f"{speed} samples/s")
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.0%}")
        if self.left_seconds and not over:
            parts.append(f"{short_duration(self.left_seconds)} left")
        return ", ".join(parts)
