"""Each step's metrics as one record, and loggers of it: CSV, JSON lines, TensorBoard, Weights & Biases, MLflow.

with StepLogger(CsvLog("steps.csv"), WandbLog(wandb.init(project="gpt"))) as log:
    for x, y in data:
        result = pipe.step(x, target=y)
        log.add(pipe.step_count, result, rows=len(x), gradient_norm=pipe.clip_grad_norm_(1.0))
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

from torch import Tensor

from penstock._base.errors import ArgumentError, require
from penstock._base.files import quoted
from penstock.runtime.step.results import StepResult

SHOWN = {
    "loss": "loss",
    "gradient_norm": "gradient_norm",
    "bubble": "bubble",
    "seconds": "time/step",
    "rows_per_second": "rate/rows",
    "tokens_per_second": "rate/tokens",
}
"""The names under which loggers show a step's metrics."""


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Metrics of one step; None if unknown.

    Attributes:
        step: its number.
        loss: of the whole batch.
        gradient_norm: before clipping.
        bubble: the share of the pipeline's time in which ranks did not compute.
        seconds: since the step before was logged.
        rows_per_second, tokens_per_second: of the whole batch.
        parts: what else the loss function returned, by name.
    """

    step: int
    loss: float
    gradient_norm: float | None = None
    bubble: float | None = None
    seconds: float | None = None
    rows_per_second: float | None = None
    tokens_per_second: float | None = None
    parts: Mapping[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """The known metrics, by the names that loggers show (`SHOWN`, and part/NAME)."""
        values = {label: getattr(self, name) for name, label in SHOWN.items()}
        values |= {f"part/{name}": part for name, part in self.parts.items()}
        return {name: value for name, value in values.items() if value is not None}


class Log(Protocol):
    """The interface of a log: anything with these two methods."""

    def write(self, figures: StepFigures) -> None:
        """Write one step's metrics."""

    def close(self) -> None:
        """Write what is still buffered."""


class StepLogger:
    """Passes each step's metrics to one or more logs.

    Make it on one rank only, any that has the loss (`pipe.is_main_process`, or all of them with `broadcast_loss`). It
    does not communicate, so other ranks need not have one.

    Args:
        logs: where figures go.
        clock: returns the time in seconds.
    """

    def __init__(self, *logs: Log, clock: Callable[[], float] = time.perf_counter) -> None:
        self._logs = logs
        self._clock = clock
        self._previous_time: float | None = None

    def add(
        self,
        step: int,
        result: StepResult,
        *,
        rows: int | None = None,
        tokens: int | None = None,
        gradient_norm: Tensor | float | None = None,
    ) -> StepFigures:
        """Log one step, and return what it logged. Call it after the step; it waits for the loss.

        The time of a step is that since the previous call, so the first step has neither it nor rates. Steps with a
        timeline also have a bubble, unless one process runs all ranks.

        Args:
            step: the step's number.
            result: what `Pipeline.step` returned.
            rows, tokens: their number in the whole batch, for rates per second.
            gradient_norm: what `Pipeline.clip_grad_norm_` returned.
        """
        loss = float(result.loss)
        now = self._clock()
        seconds = None if self._previous_time is None else now - self._previous_time
        self._previous_time = now
        timeline = result.timeline
        figures = StepFigures(
            step,
            loss,
            None if gradient_norm is None else float(gradient_norm),
            timeline.bubble_rate if timeline is not None and not timeline.serialized else None,
            seconds,
            rows / seconds if rows is not None and seconds else None,
            tokens / seconds if tokens is not None and seconds else None,
            {name: float(part) for name, part in result.parts.items()},
        )
        for log in self._logs:
            log.write(figures)
        return figures

    def close(self) -> None:
        """Close the logs, all of them even if one raises."""
        with ExitStack() as stack:
            for log in self._logs:
                stack.callback(log.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _FileLog:
    """A file with a line for each step, flushed step by step; one that exists is continued."""

    def __init__(self, path: str | Path) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._file = Path(path).open("a+", encoding="utf-8", newline="")  # noqa: SIM115  (`close` does)
        if self._file.tell() and not Path(path).read_bytes().endswith(b"\n"):
            self._file.write("\n")  # a crash left the last line incomplete

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLinesLog(_FileLog):
    """A file with a JSON object for each step, flushed step by step; one that exists is continued.

    A figure that is no number (NaN, Infinity) is written as text: JSON has none.
    """

    def write(self, figures: StepFigures) -> None:
        """Append a line."""
        values = {name: value if math.isfinite(value) else str(value) for name, value in figures.scalars().items()}
        self._file.write(json.dumps({"step": figures.step} | values) + "\n")
        self._file.flush()


class CsvLog(_FileLog):
    """A CSV file with a line for each step and a column for each figure, flushed step by step; one that exists is
    continued.

    Args:
        path: the file.
        parts: the names of the loss's parts, which get columns, too.

    Raises:
        ArgumentError: the file that exists has other columns.
    """

    def __init__(self, path: str | Path, *, parts: tuple[str, ...] = ()) -> None:
        super().__init__(path)
        columns = ["step", *SHOWN.values(), *(f"part/{name}" for name in parts)]
        self._file.seek(0)
        header = self._file.readline().strip()
        if header not in ("", ",".join(columns)):
            self.close()
            raise ArgumentError(
                f"{path} begins with {quoted(header)}; expected {','.join(columns)}: pass another path or these parts="
            )
        self._lines = csv.DictWriter(self._file, columns, lineterminator="\n")
        if not header:
            self._lines.writeheader()

    def write(self, figures: StepFigures) -> None:
        """Append a line; unknown metrics stay empty."""
        values = {"step": figures.step} | figures.scalars()
        if unknown := sorted(values.keys() - set(self._lines.fieldnames)):
            names = tuple(name.removeprefix("part/") for name in unknown)
            raise ArgumentError(f"the loss has parts without a column: {', '.join(names)}; pass CsvLog(parts={names})")
        self._lines.writerow(values)
        self._file.flush()


class TensorBoardLog:
    """A folder of event files that `tensorboard --logdir` reads. Needs `penstock[tensorboard]`.

    Raises:
        MissingExtraError: the package `tensorboard` is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        require("tensorboard", "tensorboard", for_what="a TensorBoardLog")
        from torch.utils.tensorboard import SummaryWriter

        self._events = SummaryWriter(str(folder))

    def write(self, figures: StepFigures) -> None:
        """Add a scalar for each figure."""
        for name, value in figures.scalars().items():
            self._events.add_scalar(name, value, figures.step)

    def close(self) -> None:
        """Write what is still buffered."""
        self._events.close()


class StepWriter(StepLogger):
    """`StepLogger(TensorBoardLog(folder))`, by its older name."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(TensorBoardLog(folder), clock=clock)


class WandbLog:
    """A run of Weights & Biases, as `wandb.init(...)` returns it; pass it mode="offline" to work offline."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def write(self, figures: StepFigures) -> None:
        """Log the figures at their step."""
        self._run.log(figures.scalars(), step=figures.step)

    def close(self) -> None:
        """Leave the run open: who began it ends it (`run.finish()`)."""


class MlflowLog:
    """A run of MLflow, as `mlflow.start_run()` or `MlflowClient().create_run(...)` returns it.

    Args:
        run: its figures go to the current tracking server, or to the client's.
        client: an `mlflow.MlflowClient`; a new one if it is not given.
    """

    def __init__(self, run: Any, client: Any = None) -> None:
        if client is None:
            from mlflow import MlflowClient

            client = MlflowClient()
        self._run_id, self._client = run.info.run_id, client

    def write(self, figures: StepFigures) -> None:
        """Log the figures at their step."""
        for name, value in figures.scalars().items():
            self._client.log_metric(self._run_id, name, value, step=figures.step)

    def close(self) -> None:
        """Leave the run open: who began it ends it (`mlflow.end_run()`)."""
