"""Every sample of a run, a line each, written as soon as its trial has ended: what a killed run leaves is whole.

The folder of a run:

    run.json       what was run, where, and how it ended
    samples.csv    trial,transfer,rank,start_ns,end_ns        on the clock of rank 0
    steps.csv      trial,transfer,rank,round,start_ns,end_ns  of the trials that are kept whole: the first, and each
                   that was slower than all before it
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArgumentError

RUN, SAMPLES, STEPS = "run.json", "samples.csv", "steps.csv"
HEAD = ("trial", "transfer", "rank", "start_ns", "end_ns")
STEPS_HEAD = ("trial", "transfer", "rank", "round", "start_ns", "end_ns")


class SampleFile:
    """Appends rows to a file with a head; each call of `add` reaches the file system before it returns."""

    def __init__(self, path: Path, head: tuple[str, ...]) -> None:
        self._file = path.open("w", newline="")
        self._writer = csv.writer(self._file, lineterminator="\n")
        self._writer.writerow(head)
        self._file.flush()

    def add(self, rows: Iterable[tuple[int, ...]]) -> None:
        self._writer.writerows(rows)
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Run:
    """A run as its folder has it.

    Attributes:
        record: run.json: `workload` (as `Workload.to_dict`), `algorithm`, `hosts`, `trials` (asked for), `overlap`,
            `environment`, `link`, `complete`, `missing` and more.
        start_ns, end_ns: by trial, transfer (in order of the workload) and rank; -1 where a rank takes no part.
            Only whole trials.
        steps: rows of steps.csv.
    """

    record: dict[str, Any]
    start_ns: NDArray[np.int64]
    end_ns: NDArray[np.int64]
    steps: tuple[tuple[int, ...], ...] = field(default=(), repr=False)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Of a finished run, or of one that was killed: a trial that is not whole is left out.

        Raises:
            ArgumentError: the folder holds no run.
        """
        try:
            record = json.loads((folder / RUN).read_text())
            lines = (folder / SAMPLES).read_text().split("\n")
        except (OSError, ValueError) as error:
            raise ArgumentError(f"{folder} holds no run of penstock fabric: {error}") from None
        transfers, hosts = record["workload"]["transfers"], record["hosts"]
        taking = np.array([[not t["ranks"] or rank in t["ranks"] for rank in range(hosts)] for t in transfers])
        table = _table(lines, len(HEAD))
        whole = len(table) // int(taking.sum()) if taking.any() else 0
        start = np.full((whole, len(transfers), hosts), -1, np.int64)
        end = start.copy()
        table = table[table[:, 0] < whole]
        start[table[:, 0], table[:, 1], table[:, 2]] = table[:, 3]
        end[table[:, 0], table[:, 1], table[:, 2]] = table[:, 4]
        steps = folder / STEPS
        rows = _table(steps.read_text().split("\n"), len(STEPS_HEAD)) if steps.exists() else np.empty((0, 6), np.int64)
        return cls(record, start, end, tuple(tuple(int(value) for value in row) for row in rows))


def _table(lines: list[str], columns: int) -> NDArray[np.int64]:
    """The rows below the head; a last line that was cut off is left out."""
    rows = [line.split(",") for line in lines[1:-1]]  # what stands behind the last line's end is empty, or cut off
    return np.array([row for row in rows if len(row) == columns], np.int64).reshape(-1, columns)
