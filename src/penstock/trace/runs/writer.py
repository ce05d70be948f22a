"""Writes a run's folder from a thread, so that training waits for no disk.

Errors of the files never end a run: `trouble` has the first one.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import read_json, read_text, remove_leftovers, write_json_line
from penstock._base.formatting import one_line
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.folder import (
    ABOUT,
    MEMORY,
    PREDICTED,
    RANKS,
    STEPS,
    TIMELINES,
    append_lines,
    clear,
    end_last_line,
    set_aside,
)
from penstock.trace.runs.records import StepRecord

BEAT_SECONDS = 0.25
"""Interval at which the thread looks at what the process does."""
_FIRST_SECONDS = 0.05
"""The same, until the folder is visible."""
STEADY_SECONDS = 1.0
"""Interval at which a process writes its state if nothing has changed."""
_MAX_STEPS = 100_000
_MAX_FILES = 64
"""Steps and files that are kept while the disk is full, or the folder is not visible yet."""


class Writer:
    """One process's part of a run's folder.

    Args:
        number: of the process. Number 0 makes the folder and writes what there is once; the others write their own
            part as soon as they see it, and nothing if they never do: their host has another file system.
        state: what the process does now, ready for ranks/N.json; called by the thread.
        each_beat, at_end: also called by the thread.
    """

    def __init__(
        self,
        path: Path,
        run_id: str,
        number: int,
        state: Callable[[], Mapping[str, Any]],
        each_beat: Callable[[], None] | None = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        self.path = path
        self.trouble: str | None = None
        self._id, self._number, self._state = run_id, number, state
        self._each_beat, self._at_end = each_beat, at_end
        self._steps: list[StepRecord] = []
        self._files: list[tuple[Path, Callable[[], Any]]] = []
        self._lock = threading.Lock()
        self._folder_exists = False
        self._file_id: tuple[int, int] | None = None
        self._written: Mapping[str, Any] = {}
        self._written_at = 0.0
        self._wake, self._closing = threading.Event(), False
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="penstock-run-folder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def step(self, record: StepRecord) -> None:
        """Add a line to steps.jsonl, soon."""
        with self._lock:
            self._steps.append(record)
            del self._steps[:-_MAX_STEPS]

    def file(self, name: str, make: Callable[[], Any]) -> None:
        """Write a file, soon. `make` gives its value, on the thread."""
        with self._lock:
            self._files.append((self.path / name, make))
            del self._files[:-_MAX_FILES]

    def flush(self) -> None:
        """Have the thread write what is pending now."""
        self._wake.set()

    def close(self, seconds: float | None = None) -> None:
        """Write what is pending and end the thread, which writes `state` to ranks/ once more.

        Args:
            seconds: how long to wait for it at most.
        """
        if self._closing or os.getpid() != self._pid or self._thread.ident is None:  # not started
            return
        self._closing = True
        self._wake.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            self._wake.wait(BEAT_SECONDS if self._folder_exists else _FIRST_SECONDS)
            self._wake.clear()
            last = self._closing
            self._catch(self._beat, last)
            callback = self._at_end if last else self._each_beat
            if callback is not None:
                self._catch(callback)
            if last:
                return

    def _catch(self, function: Callable[..., None], *args: Any) -> None:
        try:
            function(*args)
        except OSError as error:
            self.trouble = self.trouble or f"{error.filename or self.path}: {error.strerror or error}"
        except Exception as error:  # the thread goes on
            self.trouble = self.trouble or one_line(error)

    def _beat(self, last: bool) -> None:
        if not self._is_mine():
            return
        with self._lock:
            steps, files = self._steps, self._files
            self._steps, self._files = [], []
        if steps:
            try:
                append_lines(self.path / STEPS, [step.to_line() for step in steps])
            except OSError:
                with self._lock:
                    self._steps, self._files = [*steps, *self._steps], [*files, *self._files]
                raise
        for path, make in files:
            self._catch(lambda path=path, make=make: write_json_line(path, make()))
        state, now = self._state(), time.monotonic()
        if last or state != self._written or now - self._written_at >= STEADY_SECONDS:
            self._written, self._written_at = state, now
            write_json_line(self.path / RANKS / f"{self._number}.json", {"run": self._id, "at": time.time(), **state})

    def _is_mine(self) -> bool:
        """Whether process 0 has made the folder, as seen here. Raise OSError if another run has begun there."""
        about = self.path / ABOUT
        try:
            status = about.stat()
            if self._file_id != (status.st_ino, status.st_mtime_ns):
                is_mine = self._id in read_text(about)
                if not is_mine and (self._folder_exists or self._number == 0):
                    raise OSError(errno.EBUSY, "another run has begun in this folder", str(self.path))
                self._folder_exists, self._file_id = is_mine, (status.st_ino, status.st_mtime_ns)
        except FileNotFoundError:
            if self._folder_exists:
                raise
            return False
        return self._folder_exists


def begin(path: Path, about: RunInfo, first_step: int, earlier: RunInfo | None) -> None:
    """Make the folder of a run, or continue the one that is there.

    Args:
        first_step: the number of its first step. If that is 1, whatever was there is set aside.
        earlier: the run that was in the folder, if any.

    Raises:
        OSError: something cannot be written.
    """
    path.mkdir(parents=True, exist_ok=True)
    if earlier is not None and first_step == 1:
        set_aside(path, (ABOUT, PREDICTED, STEPS, TIMELINES, MEMORY, RANKS))
    elif earlier is not None:
        about = replace(about, started=earlier.started, resumed=(*earlier.resumed, about.started))
        if not about.same_layout(earlier):
            set_aside(path, (PREDICTED, TIMELINES, MEMORY))
    for name in (TIMELINES, MEMORY, RANKS):
        (path / name).mkdir(exist_ok=True)
    clear(path / RANKS)
    clear(path / TIMELINES, first_step)
    for folder in (path, path / MEMORY):
        remove_leftovers(folder)
    end_last_line(path / STEPS)
    write_json_line(path / ABOUT, about.to_dict())


def earlier_run(path: Path) -> RunInfo | None:
    """Return the run that is in a folder, to be continued or set aside; None if there is none. Raise ArgumentError if
    the folder has a run of another version or tool, or part of one."""
    label = f"run_dir={str(path)!r}"
    if os.path.exists(path / ABOUT):  # also False without permission: then nothing is recorded
        return RunInfo.from_dict(read_json(path / ABOUT, label), f"{label}: the {ABOUT} in this folder")
    if leftovers := [name for name in (STEPS, TIMELINES, MEMORY, RANKS) if os.path.exists(path / name)]:
        raise ArgumentError(
            f"{label}: this folder has {leftovers[0]}, but no {ABOUT}; pass another folder, or an empty one"
        )
    return None
