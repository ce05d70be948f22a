"""The TensorBoard writer by its older name; `penstock.integrations.loggers` has it beside other loggers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from penstock.integrations.loggers import StepLogger, TensorBoardLog


class StepWriter(StepLogger):
    """`StepLogger(TensorBoardLog(folder))`."""

    def __init__(self, folder: str | Path, *, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__(TensorBoardLog(folder), clock=clock)
