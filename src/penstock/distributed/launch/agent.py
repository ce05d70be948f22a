"""The agent of a job: torchrun for the ranks of one machine, or of one host, in its own process.

So the launcher needs no torch, and prints one line instead of torchrun's box.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from penstock._base.process import environments
from penstock.distributed.launch.endings import FAILURES, RankFailure

AGENT_SECONDS = 4
"""What the agent gives the ranks to end after a signal or a failure, before it kills them."""

TAG = "PENSTOCK_JOB"
"""In the environment of all processes of a job: its name."""
_PR_SET_PDEATHSIG = 1
_WAKE_SECONDS = 0.5
_ENDING = 1 << signal.SIGTERM - 1 | 1 << signal.SIGINT - 1
"""As sets of signals in /proc."""

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def agent_command(arguments: Sequence[str]) -> list[str]:
    """Return the command of one machine's agent, to be started in an environment with a `TAG`: torchrun with these
    arguments.

    It ends when this process does, and imports nothing from the current folder. Of the arguments those that begin with
    `--` are torchrun's, up to the script's path, or `-m` and a module; all that follow are the script's (rank.py).
    """
    return [sys.executable, "-P", "-m", "penstock.distributed.launch.agent", str(os.getpid()), *arguments]


def end_with_parent(parent: int) -> bool:
    """Send this process a SIGTERM when its parent ends, from now on (on Linux). Return False if it has ended
    already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


def kill_remaining(job: str, tag: str = TAG) -> None:
    """Kill the remaining processes of a job: ranks have their own sessions, so their environment identifies them."""
    for _ in range(100):  # until none is found: a process may have started another meanwhile
        pids = remaining_processes(job, tag=tag)
        if not pids:
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def remaining_processes(job: str, exclude: Sequence[int] = (), tag: str = TAG) -> set[int]:
    """Return the processes of a job that have not ended, but for this one and those named."""
    mark = f"{tag}={job}".encode()
    return {pid for pid, environment in environments() if mark in environment} - {os.getpid(), *exclude}


def _resume_ending_children() -> None:
    """Continue this process's children that are stopped and were signaled to end, from now on: a stopped process acts
    on no signal but SIGKILL, which torchrun sends after half a minute. Of this process's threads only this one is
    interrupted: the others block SIGINT, and so do ranks until they run the program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    while True:
        time.sleep(_WAKE_SECONDS)
        for file in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                fields = dict(line.split(":\t", 1) for line in file.read_text().splitlines())
                signals = int(fields["SigPnd"], 16) | int(fields["ShdPnd"], 16)
                if fields["State"].startswith("T") and int(fields["PPid"]) == os.getpid() and signals & _ENDING:
                    os.kill(int(fields["Pid"]), signal.SIGCONT)


class _ExitTimes:
    """When this process's children ended. torchrun records whole seconds, which is too coarse to compare agents."""

    def __init__(self) -> None:
        self._at_ns: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, self._note)
        signal.siginterrupt(signal.SIGCHLD, False)  # system calls continue

    def _note(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # torchrun still takes its status
            if ended is not None:
                self._at_ns.setdefault(ended.si_pid, time.monotonic_ns())

    def note(self, failures: dict[int, ProcessFailure]) -> None:
        """Leave those that torchrun has seen, by rank, for the launcher."""
        now = time.monotonic_ns()
        for rank, failure in failures.items():
            at_ns = self._at_ns.get(failure.pid, now)
            RankFailure(rank, failure.exitcode, at_ns).write(os.environ[FAILURES])


def _agent(launcher: int, arguments: Sequence[str]) -> int:
    """Return the job's exit status, by torchrun, in a process that ends when its launcher does."""
    if not end_with_parent(launcher):
        return 128 + signal.SIGTERM
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from penstock.distributed.launch.loopback import stay_on_loopback

    if "LOGLEVEL" not in os.environ:
        # The second has its own level. It reports agents that leave the last barrier before others know it is
        # passed, which is no error, and happens on slow networks.
        for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    index = next(index for index, argument in enumerate(arguments) if not argument.startswith("--"))
    parsed = torchrun.get_args_parser().parse_args([*arguments[:index], sys.executable])
    parsed.no_python = True
    parsed.training_script_args = ["-P", "-u", "-m", "penstock.distributed.launch.rank", *arguments[index:]]
    parsed.shutdown_timeout, parsed.log_dir = AGENT_SECONDS, os.devnull  # or torchrun leaves a folder in /tmp
    if parsed.standalone:
        stay_on_loopback(parsed)
    exit_times = _ExitTimes()
    threading.Thread(target=_resume_ending_children, daemon=True).start()
    try:
        torchrun.run(parsed)  # type: ignore[no-untyped-call]
    except SignalException as error:
        return 128 + error.sigval
    except ChildFailedError as failure:
        exit_times.note(failure.failures)
        return 1
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_agent(int(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        for last in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(last, signal.SIG_IGN)  # another one must leave no rank behind
        kill_remaining(os.environ[TAG])
