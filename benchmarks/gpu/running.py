"""Runs cases, each in a process of its own, which is ended with all that it started when its time is up.

A case is a fork of this process, which has imported what it needs but never touches the device. It leads a session;
what is in there, or bears the case's mark in its environment, is killed when the case ends.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from cases.case import Case, DeviceType, Setting, World
from rows import LOG_CHARACTERS, LOGGED, TIME_WAS_UP, Row, outcome, row
from worlds import WorldRun

from penstock.distributed.launch.agent import TAG, end_with_parent, kill_remaining
from penstock.distributed.launch.endings import describe_exit

GIB_PER_CASE = 4.0
"""Of the device's memory and of the host's: two processes, each with a context, libraries and a small model."""

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.02

DUMP_SECONDS = 1.0
"""For processes to write where their threads are."""

MAX_NCCL_JOBS = 2
"""Jobs at a time whose ranks wait on the device: they take turns there, and one that waits takes its turn too."""


class _Process:
    """A case under way in a process of its own."""

    is_over = False
    _is_asked = False

    def __init__(self, case: Case, device: DeviceType, environment: Mapping[str, str]) -> None:
        self.alone, self.uses_nccl = case.alone, case.uses_nccl
        self._case, self._limit = case, case.seconds * Setting(device, Path()).patience
        self._folder, self._mark = Path(tempfile.mkdtemp(prefix="penstock-gpu-")), secrets.token_hex(8)
        self._result = self._folder / "result"
        self._began = time.monotonic()
        self._pid = _begin(case, Setting(device, self._folder), {**environment, TAG: self._mark})

    def ask(self) -> None:
        """Has its processes write where their threads are, unless it has a result; later ones are ignored."""
        if not self._has_ended() and not self._result.exists():
            self._is_asked = True
            for pid in (int(folder.name) for folder in Path("/proc").glob("[0-9]*")):
                with contextlib.suppress(ProcessLookupError):
                    if os.getpgid(pid) == self._pid:
                        os.kill(pid, signal.SIGUSR1)
                        time.sleep(0.03)  # at once they would write into each other's lines

    def _has_ended(self) -> bool:
        if self._is_asked:
            return False
        return os.waitid(os.P_PID, self._pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    def look(self, is_up: bool) -> list[Row]:
        """The case's row once it has ended, or its time is up. `is_up`: that of all is, and it was asked."""
        seconds = time.monotonic() - self._began
        has_ended = self._has_ended()
        is_late = not has_ended and seconds > self._limit
        if not has_ended and not is_late and not is_up:
            return []
        if is_late and not self._is_asked:
            self.ask()
            time.sleep(DUMP_SECONDS)
        log = self._folder / "log"
        read = json.loads(self._result.read_text()) if self._result.exists() and not self._is_asked else None
        said = log.read_text(errors="replace").strip()[-LOG_CHARACTERS:] if log.exists() else ""
        exitcode = self.end()
        self.is_over = True
        if read is not None:
            return [row(self._case, **read, seconds=seconds, **({"log": said} if read["status"] in LOGGED else {}))]
        if has_ended:
            status, words = "crashed", f"its process {describe_exit(exitcode)}"
        elif is_late:
            status, words = "timed out", f"ended after {seconds:.0f} s"
        else:
            status, words = "cut off", f"cut off after {seconds:.0f} s: {TIME_WAS_UP}"
        return [row(self._case, status, words, seconds, log=said)]

    def end(self) -> int:
        """Kills what the case has left, and its own process if that still runs. Returns its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)  # not yet waited for, so that the id is still its own
        os.kill(self._pid, signal.SIGKILL)  # it may not lead its session yet
        _, status = os.waitpid(self._pid, 0)
        kill_remaining(self._mark)
        shutil.rmtree(self._folder, ignore_errors=True)
        return os.waitstatus_to_exitcode(status)


def run(
    cases: Sequence[Case],
    device: DeviceType,
    jobs: int,
    until: float,
    ended: Callable[[Row], None],
    environment: Mapping[str, str] = MappingProxyType({}),
    forks: bool = False,
) -> None:
    """Runs cases, `jobs` at a time, those that measure one by one. Those of one world are one job.

    Args:
        until: a time of the monotonic clock. Those that have not begun by then do not, others are ended.
        ended: called with each row, as it comes.
        environment: variables that each case gets.
        forks: all ranks are forks of this process, and torchrun starts none.
    """
    waiting = _in_jobs(cases)
    running: list[_Process | WorldRun] = []
    try:
        while waiting or running:
            while time.monotonic() < until:
                mine = next((job for job in waiting if _may_begin(job[0], running, jobs)), None)
                if mine is None:
                    break
                waiting.remove(mine)
                with _uninterrupted():
                    if mine[0].world:
                        running.append(WorldRun(mine, device, environment, forks))
                    else:
                        running.append(_Process(mine[0], device, environment))
            is_up = time.monotonic() >= until
            if is_up:
                for one in running:
                    one.ask()
                time.sleep(DUMP_SECONDS if running else 0.0)
                for case in itertools.chain.from_iterable(waiting):
                    ended(row(case, "not run", TIME_WAS_UP, 0.0))
                waiting.clear()
            for one in list(running):
                for found in one.look(is_up):
                    ended(found)
                if one.is_over:
                    running.remove(one)
            time.sleep(_POLL_SECONDS)
    finally:
        for one in running:
            one.end()


def _in_jobs(cases: Sequence[Case]) -> list[list[Case]]:
    """Cases in order, those of a world with its first one, and those that measure last."""
    jobs: dict[World | str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.alone):
        jobs.setdefault(case.world or case.name, []).append(case)
    return list(jobs.values())


def usual_jobs(environment: Mapping[str, Any]) -> int:
    """How many cases may run at a time on a machine: two cores for each, and memory for all."""
    memory = min(environment["host_memory_gib"], environment.get("memory_gib", float("inf")))
    return max(1, min(environment["cores"] // 2, int(memory / GIB_PER_CASE)))


def _may_begin(case: Case, running: Sequence[_Process | WorldRun], jobs: int) -> bool:
    if not running:
        return True
    if case.uses_nccl and sum(one.uses_nccl for one in running) >= MAX_NCCL_JOBS:
        return False
    return len(running) < jobs and not case.alone and not running[0].alone


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised afterwards: in a hook of `os.fork` it would be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(case: Case, setting: Setting, environment: Mapping[str, str]) -> int:
    """Forks the case's process, and returns its id."""
    parent = os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        end_with_parent(parent)
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_DFL)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        os.environ |= environment
        log = os.open(setting.folder / "log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        _work(case, setting)
        os._exit(0)
    finally:
        os._exit(1)


def _work(case: Case, setting: Setting) -> None:
    """In the case's process: leaves what it found."""
    result = outcome(case, setting)
    part = setting.folder / "result.part"
    part.write_text(json.dumps(result))
    part.rename(setting.folder / "result")
    sys.stdout.flush()
    sys.stderr.flush()
