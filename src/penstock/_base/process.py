"""Processes of this machine, as the kernel shows them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ProcessState = Literal["running", "stopped", "gone", "unknown"]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True, slots=True)
class Process:
    """A process that others on the same machine can look up: machine, id, and start time, since ids are reused."""

    machine: str
    pid: int
    started: str

    def __post_init__(self) -> None:  # another process may have sent it
        if not (isinstance(self.machine, str) and type(self.pid) is int and isinstance(self.started, str)):
            raise TypeError(f"not a process: {self!r}")

    @classmethod
    def here(cls) -> Process:
        try:
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
            return cls(" ".join([kernel(), *spaces]), os.getpid(), _stat(os.getpid())[1])
        except OSError:
            return cls(socket.gethostname(), os.getpid(), "")

    def state(self) -> ProcessState:
        """Return the process's state; `unknown` on another machine or if /proc cannot be read."""
        if not self.started or self.machine != Process.here().machine:
            return "unknown"
        try:
            letter, started = _stat(self.pid)
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        except OSError:  # this process has no file descriptor left, for example
            return "unknown"
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "running"


def kernel() -> str:
    """Return the running kernel, and so its clock; empty if unknown."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether a process of this machine has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it is another user's
        return True
    with contextlib.suppress(OSError):
        return _stat(pid)[0] not in "ZX"  # a zombie has ended
    return True


def environments() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the processes of this user, with the environment that each was started with, on Linux."""
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            yield int(file.parent.name), file.read_bytes().split(b"\0")


def _stat(pid: int) -> tuple[str, str]:
    """State and start time. The name before them is in parentheses and may contain anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
