"""Every sample of a run, a line each, written as soon as its trial has ended: what a killed run leaves is whole.

The folder of a run:

    spec.json      what is to be run, before any host has started (where hosts are started here)
    run.json       what was run, where, and how it ended: from the moment that all hosts have joined
    samples.csv    trial,transfer,rank,start_ns,end_ns        on the clock of rank 0
    steps.csv      trial,transfer,rank,round,start_ns,end_ns  of the trials that are kept whole: the first, and each
                   that was slower than all before it
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ArgumentError

SPEC, RUN, SAMPLES, STEPS = "spec.json", "run.json", "samples.csv", "steps.csv"
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
            ArgumentError: the folder holds no run, or one that ended before its hosts had joined.
        """
        if not (folder / RUN).exists() and (folder / SPEC).exists():
            raise ArgumentError(
                f"the run in {folder} ended before its hosts had joined, so it has no samples: what they printed is in "
                f"{folder}/host-*.log. Run it again with --out {folder}, which replaces it"
            )
        try:
            record = json.loads((folder / RUN).read_text())
            table, steps = (_table(folder / SAMPLES, HEAD), _table(folder / STEPS, STEPS_HEAD))
        except FileNotFoundError:
            reason = f"it has no {RUN}" if folder.is_dir() else "there is no such folder"
            raise ArgumentError(
                f"{folder} holds no run of penstock fabric: {reason}. Give a folder that a run was written to, such as "
                "runs/fabric-1"
            ) from None
        except (OSError, ValueError) as error:
            raise ArgumentError(f"{folder} holds no run of penstock fabric: {error}") from None
        if not _is_record(record):
            raise ArgumentError(f"{folder} holds no run of penstock fabric: its {RUN} is of something else")
        transfers, hosts = record["workload"]["transfers"], record["hosts"]
        taking = np.array([[not t["ranks"] or rank in t["ranks"] for rank in range(hosts)] for t in transfers])
        whole = len(table) // int(taking.sum()) if taking.any() else 0
        start = np.full((whole, len(transfers), hosts), -1, np.int64)
        end = start.copy()
        table = table[table[:, 0] < whole]
        start[table[:, 0], table[:, 1], table[:, 2]] = table[:, 3]
        end[table[:, 0], table[:, 1], table[:, 2]] = table[:, 4]
        return cls(record, start, end, tuple(tuple(row) for row in steps.tolist()))


def _is_record(found: Any) -> bool:
    return isinstance(found, dict) and "hosts" in found and "transfers" in (found.get("workload") or ())


def _table(path: Path, head: tuple[str, ...]) -> NDArray[np.int64]:
    """The rows below the head; a last line that was cut off is left out. None of a file that was not begun."""
    text = path.read_text() if path.exists() else ""
    _, _, rows = text[: text.rfind("\n") + 1].partition("\n")  # what follows the last line's end was cut off
    if not rows:
        return np.empty((0, len(head)), np.int64)
    return np.loadtxt(io.StringIO(rows), np.int64, delimiter=",", ndmin=2, usecols=range(len(head)))
