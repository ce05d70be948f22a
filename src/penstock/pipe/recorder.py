"""Records a run in a folder: `penstock.pipeline(..., run_dir="runs/gpt")`.

The main thread only notes what a step was, and hands it to the thread that writes. A step's loss travels between ranks,
so it is read at the end of a later step, when it has long been here, several at a time where steps are short: recording
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
from penstock._base.files import write_whole
from penstock.distributed.failure import Failure, Position
from penstock.distributed.launch.endings import register_run
from penstock.distributed.watchdog import Watchdog
from penstock.distributed.world import World
from penstock.pipe.result import StepResult
from penstock.pipe.verified import passed
from penstock.runtime.execute.clock import counter
from penstock.runtime.step.results import SharedLoss
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
"""And for its files."""


_Noted = tuple[StepRecord, SharedLoss | None]
"""A step that has ended, without its loss, which may still be on its way. Holds none of its outputs."""


class Recorder:
    """One process's part in recording a run.

    Args:
        asked: what `run_dir=` says.
        run_id: the same on all processes.
        about: the run; None on all processes but the first, which alone writes what there is once.
        earlier: the run that is in the folder, if any.
        before: what is known before the first step, by file.
        devices: those of this process's ranks.
    """

    def __init__(
        self,
        asked: RunConfig,
        run_id: str,
        about: RunInfo | None,
        earlier: RunInfo | None,
        before: Mapping[str, Any],
        world: World,
        watchdog: Watchdog,
        devices: tuple[torch.device, ...],
    ) -> None:
        self._asked, self._about, self._earlier, self._before = asked, about, earlier, before
        self._first_replica = world.replica == 0
        self._replicas = world.data_parallel
        self._present = Present(world, watchdog, devices)
        self._line = (
            LiveLine(asked.total_steps) if about is not None and asked.progress_bar and sys.stderr.isatty() else None
        )
        on_beat = () if self._line is None else (self._line.draw, self._line.close)
        self._writer = Writer(Path(asked.path), run_id, world.number, self._present, *on_beat)
        watchdog.raised, watchdog.last_words = self.fail, partial(self.end_now, _LAST_FILES_SECONDS)
        self._started = False
        self._steps = 0
        self._noted: list[_Noted] = []
        self._began_seconds = self._start_seconds = self._read_seconds = 0.0
        self._told = False

    def begin(self, step: int, fingerprint: Callable[[], str]) -> bool:
        """Called before each training step, with its number, counted from 1.

        Returns whether its timeline is to be recorded, alike on all ranks.
        """
        if not self._started:
            self._started = True
            if self._about is not None and (mark := fingerprint()) in passed:
                self._about = replace(self._about, verified=mark)
            self._start(step)
        self._present.step, self._present.failure = step, None
        self._began_seconds = time.perf_counter()
        return self._asked.times(step, self._steps + 1)

    def end(self, step: int, result: StepResult, allocated: Mapping[int, Sequence[int]]) -> None:
        """Called after each training step, with what it gives back.

        Args:
            allocated: what devices had allocated in the last step that was timed, by rank.
        """
        self._steps += 1
        if self._asked.times(step, self._steps) and self._first_replica:
            for rank, sizes in allocated.items():
                self._writer.file(f"{MEMORY}/{step}.{rank}.json", partial(list, sizes))
        if self._about is None:
            return
        now = time.perf_counter()
        timeline, bubble = result.timeline, None
        if timeline is not None and self._asked.times(step, self._steps):
            bubble = None if timeline.serialized else timeline.bubble_rate
            self._writer.file(f"{TIMELINES}/{step}.json", timeline.to_dict)
        if self._noted and now - self._read_seconds >= BEAT_SECONDS:
            self._read_seconds = now
            self._write()
        seconds, at_seconds = now - self._began_seconds, now - self._start_seconds
        rows = sum(result.sizes) * self._replicas
        self._noted.append((StepRecord(step, None, seconds, rows, at_seconds, bubble), result._loss))
        self._tell_trouble()

    def close(self) -> None:
        """Write what is left. The other ranks have ended the last step, or will, so its loss is on its way."""
        self._write()
        self._present.ended = True
        self._writer.close()
        self._tell_trouble()

    def fail(self, failure: Failure | None) -> None:
        """Something raised, which may end the run: hands over the steps that have ended. On any thread; raises nothing.

        Args:
            failure: this process's, for its state until the watchdog knows the first cause; None: it is not known yet.
        """
        if failure is not None:
            self._present.failure = failure.error if self._present.is_alone else str(failure)
        self._flush()
        self._writer.flush()

    def end_now(self, seconds: float | None = None) -> None:
        """Write what is left, but for losses that have not come in a moment, and end the thread: of a run that has
        failed, or was not closed. On any thread; raises nothing. `seconds`: to wait for files at most."""
        self._flush()
        self._writer.close(seconds)

    def _flush(self) -> None:
        """Hand over the steps that have ended, with the losses that come within a moment. Ranks that may be gone are
        asked nothing."""
        noted, self._noted = self._noted, []
        losses: list[float | None] = []
        reads = threading.Thread(target=_read_quietly, args=(noted, losses), daemon=True)
        with contextlib.suppress(RuntimeError):  # the interpreter ends, and starts no threads any more
            reads.start()
            reads.join(_LAST_LOSSES_SECONDS)
        for (record, _), loss in zip_longest(noted, losses[: len(noted)]):
            self._hand_over(record, loss)

    def _start(self, step: int) -> None:
        now = time.perf_counter()
        self._start_seconds = now
        if self._about is not None:
            if step > 1 and self._earlier is not None:
                self._start_seconds = now - self._about.seconds_since(self._earlier)
            try:
                begin(self._writer.path, self._about, step, self._earlier)
                for name, value in self._before.items():
                    write_whole(self._writer.path / name, value)
            except OSError as error:
                self._writer.trouble = f"{error.filename or self._writer.path}: {error.strerror or error}"
            register_run(self._writer.path)
        self._writer.start()

    def _write(self) -> None:
        """Read the losses of the steps noted so far, and hand the steps to the thread."""
        while self._noted:
            record, shared = self._noted[0]
            loss = None if shared is None else shared.read()
            self._hand_over(record, None if loss is None else float(loss))
            del self._noted[:1]  # only now: if the wait ends the run, the step has its last chance

    def _hand_over(self, record: StepRecord, loss: float | None) -> None:
        record = replace(record, loss=loss)
        self._writer.step(record)
        if self._line is not None:
            self._line.add(record)

    def _tell_trouble(self) -> None:
        if self._writer.trouble is not None and not self._told:
            self._told = True
            warn(f"the run is not recorded in full; training goes on: {self._writer.trouble}")


class Present:
    """What this process does, for ranks/N.json; asked by the thread that writes. Holds no part of the pipeline.

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
        self._number, self._ranks = world.number, _ranks_of(world)
        self._watchdog = watchdog
        counters = [counter(device) for device in dict.fromkeys(devices)]
        self._allocated = [count for count in counters if count is not None]
        self._host = socket.gethostname()
        self._seen: tuple[int | None, Position] | None = None
        self._since = 0.0

    def __call__(self) -> Mapping[str, Any]:
        behind, failure = self._watchdog.behind, self._watchdog.failure
        position = self._watchdog.position if behind is None else behind.position
        seen = (self.step, position)
        if seen != self._seen:
            self._seen, self._since = seen, time.time()
        mine = RankState(
            self._number,
            *self._ranks[self._number],
            self._host,
            os.getpid(),
            step=self.step,
            action=position.action,
            waits_for=position.peers,
            since=self._since,
            rss_bytes=_rss_bytes(),
            device_bytes=sum(count() for count in self._allocated) if self._allocated else None,
            ended=self.ended,
            failure=self.failure if failure is None else str(failure),
        )
        return {"state": mine.to_dict(), "heard": self._heard() if self._number == 0 else []}

    def _heard(self) -> list[dict[str, Any]]:
        """Return what process 0 last received from the others, which may write elsewhere."""
        now = time.time()
        return [
            RankState(
                number,
                *self._ranks[number],
                action=one.doing.action,
                waits_for=one.doing.peers,
                since=round(now - one.seconds, 1),
                step=self.step,
                ended=one.left,
            ).to_dict()
            for number, one in enumerate(self._watchdog.sightings)
            if number != self._number and number in self._ranks
        ]


def _read_quietly(noted: Sequence[_Noted], losses: list[float | None]) -> None:
    """Read losses one after another, as far as they come."""
    for _, shared in noted:
        loss = None
        with contextlib.suppress(Exception):
            read = None if shared is None else shared.read_quietly()
            loss = None if read is None else float(read)
        losses.append(loss)


def _ranks_of(world: World) -> dict[int, tuple[int, tuple[int, ...]]]:
    """By number of each process: the replica that it belongs to, and its ranks there."""
    if world.rank is None:
        return {0: (0, tuple(range(world.ranks)))}
    found: dict[int, tuple[int, tuple[int, ...]]] = {}
    for line in world.lines:
        for rank, member in enumerate(line):
            replicas = next((one for one in world.replica_sets if member in one), (member,))
            found[world.everyone.index(member)] = (replicas.index(member), (rank,))
    return found


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
