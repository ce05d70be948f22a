"""Records a run in a folder: `penstock.pipeline(..., run_dir="runs/gpt")`.

The main thread only records a step and hands it to the thread that writes. A step's loss travels between ranks, so it
is read at the end of a later step, when it has long arrived, several at a time where steps are short: recording
waits for nothing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from rich.text import Text

from penstock._base.errors import warn
from penstock._base.files import write_json_line
from penstock.distributed.failure import Failure, Position
from penstock.distributed.launch.endings import register_run
from penstock.distributed.watchdog import Watchdog
from penstock.distributed.world import World
from penstock.pipe.verified import verified_fingerprints
from penstock.runtime.execute.clock import counter
from penstock.runtime.step.results import SharedLoss, StepResult
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.folder import MEMORY, TIMELINES
from penstock.trace.runs.option import RunConfig
from penstock.trace.runs.progress import RECENT, Progress
from penstock.trace.runs.records import RankState, StepRecord
from penstock.trace.runs.writer import BEAT_SECONDS, Writer, begin

_PAGE = os.sysconf("SC_PAGE_SIZE")
_LAST_LOSSES_SECONDS = 0.5
"""How long a run that has failed waits for losses that are on their way."""
_LAST_FILES_SECONDS = 2.0
"""How long it waits for its files."""


_PendingStep = tuple[StepRecord, SharedLoss | None]
"""A step that has ended, without its loss, which may still be on its way. Holds none of its outputs."""


class Recorder:
    """One process's part in recording a run.

    Args:
        config: the parsed `run_dir=`.
        run_id: the same on all processes.
        info: the run; None on all processes but the first, which alone writes the files that exist once.
        previous: the run that is in the folder, if any.
        initial_files: what is known before the first step, by file.
        devices: those of this process's ranks.
    """

    def __init__(
        self,
        config: RunConfig,
        run_id: str,
        info: RunInfo | None,
        previous: RunInfo | None,
        initial_files: Mapping[str, Any],
        world: World,
        watchdog: Watchdog,
        devices: tuple[torch.device, ...],
    ) -> None:
        self._config, self._info, self._previous, self._initial_files = config, info, previous, initial_files
        self._first_replica = world.replica == 0
        self._replicas = world.data_parallel
        self._state = RankStateSource(world, watchdog, devices)
        self._line = (
            LiveLine(config.total_steps) if info is not None and config.progress_bar and sys.stderr.isatty() else None
        )
        on_beat = () if self._line is None else (self._line.draw, self._line.close)
        self._writer = Writer(Path(config.path), run_id, world.number, self._state, *on_beat)
        watchdog.on_raise, watchdog.before_exit = self.fail, partial(self.end_now, _LAST_FILES_SECONDS)
        self._started = False
        self._steps = 0
        self._pending: list[_PendingStep] = []
        self._flushing = threading.RLock()
        self._began_seconds = self._start_seconds = self._read_seconds = 0.0
        self._has_warned = False

    def begin(self, step: int, fingerprint: Callable[[], str]) -> bool:
        """Begin a training step, with its number, counted from 1.

        Return whether its timeline is to be recorded, alike on all ranks.
        """
        if not self._started:
            self._started = True
            if self._info is not None and (mark := fingerprint()) in verified_fingerprints:
                self._info = replace(self._info, verified=mark)
            self._start(step)
        self._state.step, self._state.failure = step, None
        self._began_seconds = time.perf_counter()
        return self._config.times(step, self._steps + 1)

    def end(self, step: int, result: StepResult, allocated: Mapping[int, Sequence[int]]) -> None:
        """Record a training step that has ended.

        Args:
            allocated: what devices had allocated in the last step that was timed, by rank.
        """
        self._steps += 1
        if self._config.times(step, self._steps) and self._first_replica:
            for rank, sizes in allocated.items():
                self._writer.file(f"{MEMORY}/{step}.{rank}.json", partial(list, sizes))
        if self._info is None:
            return
        now = time.perf_counter()
        timeline, bubble = result.timeline, None
        if timeline is not None and self._config.times(step, self._steps):
            bubble = None if timeline.serialized else timeline.bubble_rate
            self._writer.file(f"{TIMELINES}/{step}.json", timeline.to_dict)
        if self._pending and now - self._read_seconds >= BEAT_SECONDS:
            self._read_seconds = now
            self._write()
        seconds, at_seconds = now - self._began_seconds, now - self._start_seconds
        rows = sum(result.sizes) * self._replicas
        self._pending.append((StepRecord(step, None, seconds, rows, at_seconds, bubble), result._loss))
        self._warn_of_trouble()

    def close(self) -> None:
        """Write what is left. The other ranks have ended the last step, or will, so its loss is on its way."""
        self._write()
        self._state.ended = True
        self._writer.close()
        self._warn_of_trouble()

    def fail(self, failure: Failure | None) -> None:
        """Hand over the steps that have ended, after an error that may end the run. On any thread; raises nothing.

        Args:
            failure: this process's, for its state until the watchdog knows the first cause; None: it is not known yet.
        """
        if failure is not None:
            self._state.failure = failure.error if self._state.is_alone else str(failure)
        self._flush()
        self._writer.flush()

    def end_now(self, seconds: float | None = None) -> None:
        """Write what is left, but for losses that have not come in a moment, and end the thread: of a run that has
        failed, or was not closed. On any thread; raises nothing. `seconds`: to wait for files at most."""
        self._flush()
        self._writer.close(seconds)

    def _flush(self) -> None:
        """Hand over the steps that have ended, with the losses that arrive within `_LAST_LOSSES_SECONDS`. No other rank
        is asked for anything."""
        with self._flushing:  # or another thread would end the writer before the steps are handed over
            pending, self._pending = self._pending, []
            losses: list[float | None] = []
            reader = threading.Thread(target=_read_quietly, args=(pending, losses), daemon=True)
            with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no threads any more
                reader.start()
                reader.join(_LAST_LOSSES_SECONDS)
            for (record, _), loss in zip_longest(pending, losses[: len(pending)]):
                self._hand_over(record, loss)

    def _start(self, step: int) -> None:
        now = time.perf_counter()
        self._start_seconds = now
        if self._info is not None:
            if step > 1 and self._previous is not None:
                self._start_seconds = now - self._info.seconds_since(self._previous)
            try:
                begin(self._writer.path, self._info, step, self._previous)
                for name, value in self._initial_files.items():
                    write_json_line(self._writer.path / name, value)
            except OSError as error:
                self._writer.trouble = f"{error.filename or self._writer.path}: {error.strerror or error}"
            register_run(self._writer.path)
        self._writer.start()

    def _write(self) -> None:
        """Read the losses of the steps noted so far, and hand the steps to the thread."""
        while self._pending:
            record, shared = self._pending[0]
            loss = None if shared is None else shared.read()
            self._hand_over(record, None if loss is None else float(loss))
            del self._pending[:1]  # only now: if the wait ends the run, the step has its last chance

    def _hand_over(self, record: StepRecord, loss: float | None) -> None:
        record = replace(record, loss=loss)
        self._writer.step(record)
        if self._line is not None:
            self._line.add(record)

    def _warn_of_trouble(self) -> None:
        if self._writer.trouble is not None and not self._has_warned:
            self._has_warned = True
            warn(f"the run is not recorded in full; training goes on: {self._writer.trouble}")


class RankStateSource:
    """What this process does, for ranks/N.json; read by the thread that writes. Holds no part of the pipeline.

    Attributes:
        step: the training step under way, or the last one.
        ended: whether the pipeline is closed.
        failure: what raised here since, until the watchdog knows the first cause.
        is_alone: whether this process drives all ranks.
    """

    def __init__(self, world: World, watchdog: Watchdog, devices: tuple[torch.device, ...]) -> None:
        self.step: int | None = None
        self.ended = False
        self.failure: str | None = None
        self.is_alone = world.rank is None
        self._number, self._ranks = world.number, _ranks_by_process(world)
        self._watchdog = watchdog
        counters = [counter(device) for device in dict.fromkeys(devices)]
        self._allocated = [count for count in counters if count is not None]
        self._host = socket.gethostname()
        self._last_activity: tuple[int | None, Position] | None = None
        self._activity_since = 0.0

    def __call__(self) -> Mapping[str, Any]:
        behind, failure = self._watchdog.device_lag, self._watchdog.failure
        position = self._watchdog.position if behind is None else behind.position
        activity = (self.step, position)
        if activity != self._last_activity:
            self._last_activity, self._activity_since = activity, time.time()
        state = RankState(
            self._number,
            *self._ranks[self._number],
            self._host,
            os.getpid(),
            step=self.step,
            action=position.action,
            waits_for=position.peers,
            since=self._activity_since,
            rss_bytes=_rss_bytes(),
            device_bytes=sum(count() for count in self._allocated) if self._allocated else None,
            ended=self.ended,
            failure=self.failure if failure is None else str(failure),
        )
        return {"state": state.to_dict(), "heard": self._relayed_states() if self._number == 0 else []}

    def _relayed_states(self) -> list[dict[str, Any]]:
        """Return what process 0 last received from the others, which may write elsewhere."""
        now = time.time()
        return [
            RankState(
                number,
                *self._ranks[number],
                action=status.doing.action,
                waits_for=status.doing.peers,
                since=round(now - status.seconds, 1),
                step=self.step,
                ended=status.left,
            ).to_dict()
            for number, status in enumerate(self._watchdog.statuses)
            if number != self._number and number in self._ranks
        ]


def _read_quietly(pending: Sequence[_PendingStep], losses: list[float | None]) -> None:
    """Read losses one after another, as far as they come."""
    for _, shared in pending:
        loss = None
        with contextlib.suppress(Exception):
            value = None if shared is None else shared.read_quietly()
            loss = None if value is None else float(value)
        losses.append(loss)


def _ranks_by_process(world: World) -> dict[int, tuple[int, tuple[int, ...]]]:
    """Return, by the number of each process, its replica and its ranks there."""
    if world.rank is None:
        return {0: (0, tuple(range(world.ranks)))}
    by_process: dict[int, tuple[int, tuple[int, ...]]] = {}
    for line in world.lines:
        for rank, member in enumerate(line):
            replicas = next((members for members in world.replica_sets if member in members), (member,))
            by_process[world.everyone.index(member)] = (replicas.index(member), (rank,))
    return by_process


def _rss_bytes() -> int | None:
    """Return the resident memory of this process; None where the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE
    except OSError:
        return None


class LiveLine:
    """A line in the terminal that follows a training: step, loss, speed, bubble, time left.

    Drawn by the thread that writes the run's folder; what the program prints appears above it.

    Args:
        total_steps: how many there will be, if that is known.
    """

    def __init__(self, total_steps: int | None) -> None:
        self._total = total_steps
        self._console = Console(stderr=True, highlight=False)
        self._recent: list[StepRecord] = []
        self._bubble: float | None = None
        self._live: Live | None = None
        self._drawn: StepRecord | None = None

    def add(self, record: StepRecord) -> None:
        """Take a step. Called by the main thread; draws nothing."""
        self._bubble = self._bubble if record.bubble is None else record.bubble
        self._recent = [*self._recent[-RECENT:], record]

    def draw(self) -> None:
        """Draw the line, if there is something new to say."""
        recent = self._recent
        progress = Progress.of(recent, self._total)
        if progress is None or self._drawn is recent[-1]:
            return
        self._drawn = recent[-1]
        line = Text(str(replace(progress, bubble=self._bubble)), no_wrap=True, overflow="ellipsis", end="")
        if self._live is None:
            # A stdout that goes elsewhere stays there.
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=sys.stdout.isatty())
            self._live.start()
        self._live.update(line, refresh=True)

    def close(self) -> None:
        """Leave the last line on the screen."""
        self.draw()
        if self._live is not None:
            self._live.stop()
            self._live = None
