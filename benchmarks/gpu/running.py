"""Runs cases, each in a process of its own, which is ended with all that it started when its time is up.

A case is a fork of this process, which has imported what it needs but never touches the device. It leads a session;
what is in there, or bears the case's mark in its environment, is killed when the case ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cases.case import Case, DeviceType, NotHereError, Setting

from penstock.launch.agent import TAG, end_with_parent, how_it_ended, kill_left

Row = dict[str, Any]
"""What became of a case: its name, part, status, what it says, seconds, and what it found.

Status: "ok"; "wrong": it is not as it should be; "raised"; "crashed": its process ended without a result; "timed out";
"not here": this machine cannot show it; "not begun", or cut off: the time for all of them was up.
"""

BAD = ("wrong", "raised", "crashed", "timed out")

GIB_PER_CASE = 4.0
"""Of the device's memory and of the host's: two processes, each with a context, libraries and a small model."""

_INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
_POLL_SECONDS = 0.02
_MOST_CHARACTERS = 500


@dataclass(slots=True)
class _Running:
    case: Case
    pid: int
    mark: str
    folder: Path
    began: float = field(default_factory=time.monotonic)


def run(cases: Sequence[Case], device: DeviceType, jobs: int, until: float, ended: Callable[[Row], None]) -> None:
    """Runs cases, `jobs` at a time, those that measure one by one.

    Args:
        until: a time of the monotonic clock. Those that have not begun by then do not, others are ended.
        ended: called with each row, as it comes.
    """
    waiting = deque(sorted(cases, key=lambda case: case.alone))
    running: list[_Running] = []
    try:
        while waiting or running:
            while waiting and time.monotonic() < until and _may_begin(waiting[0], running, jobs):
                with _uninterrupted():
                    running.append(_begin(waiting.popleft(), device))
            if time.monotonic() >= until:
                for case in waiting:
                    ended(_row(case, "not begun", "the time for this part was up", 0.0))
                waiting.clear()
            for one in list(running):
                row = _look(one, until)
                if row is not None:
                    running.remove(one)
                    ended(row)
            time.sleep(_POLL_SECONDS)
    finally:
        for one in running:
            _end(one)


def usual_jobs(environment: Mapping[str, Any]) -> int:
    """How many cases may run at a time on a machine: two cores for each, and memory for all."""
    memory = min(environment["host_memory_gib"], environment.get("memory_gib", float("inf")))
    return max(1, min(environment["cores"] // 2, int(memory / GIB_PER_CASE)))


def _may_begin(case: Case, running: Sequence[_Running], jobs: int) -> bool:
    if not running:
        return True
    return len(running) < jobs and not case.alone and not running[0].case.alone


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """An interrupt that comes meanwhile is raised afterwards: in a hook of `os.fork` it would be lost."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _INTERRUPTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(case: Case, device: DeviceType) -> _Running:
    folder, mark, parent = Path(tempfile.mkdtemp(prefix="penstock-gpu-")), secrets.token_hex(8), os.getpid()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return _Running(case, pid, mark, folder)
    try:
        os.setsid()
        end_with_parent(parent)
        for number in _INTERRUPTS:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _INTERRUPTS)
        os.environ[TAG] = mark
        log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
        for stream in (1, 2):
            os.dup2(log, stream)
        _work(case, Setting(device, folder))
        os._exit(0)
    finally:
        os._exit(1)


def _work(case: Case, setting: Setting) -> None:
    """In the case's process: leaves what it found."""
    try:
        found = case.run(setting)
        result = {"status": "ok" if found["ok"] else "wrong", "says": found["says"], "found": found}
    except NotHereError as reason:
        result = {"status": "not here", "says": str(reason), "found": {}}
    except Exception as error:
        import traceback

        traceback.print_exc()
        result = {"status": "raised", "says": f"{type(error).__name__}: {error}", "found": {}}
    part = setting.folder / "result.part"
    part.write_text(json.dumps(result))
    part.rename(setting.folder / "result")
    sys.stdout.flush()
    sys.stderr.flush()


def _look(one: _Running, until: float) -> Row | None:
    """What became of a case that has ended, or whose time is up; None while it runs."""
    seconds = time.monotonic() - one.began
    is_over = os.waitid(os.P_PID, one.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    late = seconds > one.case.seconds or time.monotonic() > until
    if not is_over and not late:
        return None
    result, log = one.folder / "result", one.folder / "log"
    read = json.loads(result.read_text()) if result.exists() else None
    said = log.read_text(errors="replace").strip()[-_MOST_CHARACTERS:] if log.exists() else ""
    exitcode = _end(one)
    if read is None and not is_over and seconds <= one.case.seconds:
        return _row(one.case, "not begun", "cut off: the time for this part was up", seconds)
    if read is None:
        status = "crashed" if is_over else "timed out"
        words = f"its process {how_it_ended(exitcode)}" if is_over else f"ended after {seconds:.0f} s"
        return _row(one.case, status, words, seconds, log=said)
    about = {"log": said} if read["status"] in BAD else {}
    says = " ".join(read["says"].split())[:_MOST_CHARACTERS]
    return _row(one.case, read["status"], says, seconds, found=read["found"], **about)


def _end(one: _Running) -> int:
    """Kills what a case has left, and its own process if that still runs. Returns its exit status."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(one.pid, signal.SIGKILL)  # not yet waited for, so that the id is still its own
    os.kill(one.pid, signal.SIGKILL)  # it may not lead its session yet
    _, status = os.waitpid(one.pid, 0)
    kill_left(one.mark)
    shutil.rmtree(one.folder, ignore_errors=True)
    return os.waitstatus_to_exitcode(status)


def _row(case: Case, status: str, says: str, seconds: float, **more: Any) -> Row:
    return {"name": case.name, "part": case.part, "status": status, "says": says, "seconds": round(seconds, 1), **more}
