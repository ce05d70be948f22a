"""The agent of a job: torchrun for the ranks of one machine, or of one host, in its own process.

So whoever launches needs no torch, and one line says what torchrun says in a box.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Self

AGENT_SECONDS = 4
"""What the agent gives the ranks to end after a signal or a failure, before it kills them."""

FAILURES = "PENSTOCK_FAILURES"
"""In the environment of one agent of several: the file in which it leaves its `RankFailure`, instead of printing it."""

TAG = "PENSTOCK_JOB"
"""In the environment of all processes of a job: its name."""
_PR_SET_PDEATHSIG = 1
_WAKE_SECONDS = 0.5

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure


def agent_command(arguments: Sequence[str]) -> list[str]:
    """The command of one machine's agent, to be started in an environment with a `TAG`: torchrun with these arguments.

    It ends when this process does. Neither it nor ranks that run a module of ours import from the current folder; a
    script of the user's sees its own folder, as under `python script.py`.
    """
    at = next((at for at, argument in enumerate(arguments) if not argument.startswith("--")), len(arguments))
    command = list(arguments[at:])
    if command[:1] == ["-m"] and command[1].partition(".")[0] == "penstock":
        command = ["--no-python", sys.executable, "-P", "-u", *command]
    return [sys.executable, "-P", "-m", "penstock.launch.agent", str(os.getpid()), *arguments[:at], *command]


def end_with_parent(parent: int) -> bool:
    """From now on this process gets a SIGTERM when its parent ends (on Linux). False if that has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    return os.getppid() == parent


def kill_left(job: str) -> None:
    """Kills what the job left: ranks have their own sessions, so the mark in their environment finds them."""
    for _ in range(100):  # again until none is found: one may have started another meanwhile
        found = left(job)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def left(job: str, besides: Sequence[int] = ()) -> set[int]:
    """The processes of a job that have not ended, but for this one and those named."""
    mark = f"{TAG}={job}".encode()
    found = {int(folder.name) for folder in Path("/proc").glob("[0-9]*") if _is_marked(folder, mark)}
    return found - {os.getpid(), *besides}


def _is_marked(folder: Path, mark: bytes) -> bool:
    try:
        return mark in (folder / "environ").read_bytes().split(b"\0")
    except OSError:  # ended meanwhile, or somebody else's
        return False


def shell_status(exitcode: int) -> int:
    """A process's exit status as a shell reports it: 128 + n for signal n."""
    return 128 - exitcode if exitcode < 0 else exitcode


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The first rank that failed under one agent.

    Attributes:
        rank: of the whole job.
        exitcode: its exit status, or -n for signal n.
        at_ns: when it ended, on this machine's clock that only grows: to compare several agents.
    """

    rank: int
    exitcode: int
    at_ns: int

    @property
    def status(self) -> int:
        """As the job's own exit status."""
        return shell_status(self.exitcode)

    def __str__(self) -> str:
        return f"rank {self.rank} {how_it_ended(self.exitcode)}"

    @classmethod
    def read_all(cls, path: Path | str) -> list[Self]:
        """What agents left in the file that `FAILURES` names."""
        return [cls(**json.loads(line)) for line in Path(path).read_text().splitlines()]

    def write(self, path: str) -> None:
        """Adds it to such a file."""
        with open(path, "a") as file:
            file.write(json.dumps(asdict(self)) + "\n")


def how_it_ended(exitcode: int) -> str:
    """In words: was killed by SIGKILL; ended with exit status 3."""
    return f"was killed by {signal.Signals(-exitcode).name}" if exitcode < 0 else f"ended with exit status {exitcode}"


def _wake_the_ended() -> None:
    """Continues this process's children that are stopped and were told to end, from now on: what is stopped heeds no
    signal but SIGKILL, and for that torchrun waits half a minute."""
    while True:
        time.sleep(_WAKE_SECONDS)
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError, ValueError, IndexError):
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
                if state == "T" and int(parent) == os.getpid() and _is_told_to_end(folder):
                    os.kill(int(folder.name), signal.SIGCONT)


def _is_told_to_end(process: Path) -> bool:
    """Whether a SIGTERM or SIGINT waits for the process."""
    lines = (line.split(":") for line in (process / "status").read_text().splitlines())
    pending = {name: int(text, 16) for name, text in lines if name in ("SigPnd", "ShdPnd")}
    return any(
        waiting >> (number - 1) & 1 for waiting in pending.values() for number in (signal.SIGTERM, signal.SIGINT)
    )


class _Ends:
    """When this process's children ended. torchrun tells it to the second, which is too little to compare agents."""

    def __init__(self) -> None:
        self._at_ns: dict[int, int] = {}
        signal.signal(signal.SIGCHLD, self._note)
        signal.siginterrupt(signal.SIGCHLD, False)  # whoever waits need not know

    def _note(self, number: int, frame: FrameType | None) -> None:
        with contextlib.suppress(ChildProcessError):
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # torchrun still takes its status
            if ended is not None:
                self._at_ns.setdefault(ended.si_pid, time.monotonic_ns())

    def first(self, failures: dict[int, ProcessFailure]) -> RankFailure:
        """Of those that torchrun has seen, by rank."""
        now = time.monotonic_ns()
        found = [
            RankFailure(rank, failure.exitcode, self._at_ns.get(failure.pid, now)) for rank, failure in failures.items()
        ]
        return min(found, key=lambda failure: failure.at_ns)


def _agent(launcher: int, arguments: Sequence[str]) -> int:
    """The job's exit status, by torchrun, in a process that ends when its launcher does."""
    if not end_with_parent(launcher):
        return 128 + signal.SIGTERM
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from penstock.launch.loopback import stay_on_loopback

    if "LOGLEVEL" not in os.environ:
        # The second has its own level. It tells of agents that leave the last barrier before others know it is
        # passed, which is no error, and happens on slow networks.
        for name in ("torch.distributed", "torch.distributed.elastic.agent.server.api"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    parsed = torchrun.get_args_parser().parse_args(arguments)
    parsed.shutdown_timeout = AGENT_SECONDS
    if parsed.standalone:
        stay_on_loopback(parsed)
    of_several = os.environ.pop(FAILURES, None)
    ends = _Ends() if of_several else None
    threading.Thread(target=_wake_the_ended, daemon=True).start()
    try:
        torchrun.run(parsed)  # type: ignore[no-untyped-call]
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        if ends is not None and of_several is not None:
            first = ends.first(failed.failures)
            first.write(of_several)
        else:
            rank, failure = failed.get_first_failure()
            first = RankFailure(rank, failure.exitcode, 0)
            print(f"penstock: {first}", file=sys.stderr, flush=True)
        return first.status
    return 0


if __name__ == "__main__":
    try:
        sys.exit(_agent(int(sys.argv[1]), sys.argv[2:]))
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        for last in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(last, signal.SIG_IGN)  # another one must leave no rank behind
        kill_left(os.environ[TAG])
