"""A process that others on the same machine can look up, also by what it sent them."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ProcessState = Literal["running", "stopped", "gone", "unknown"]


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
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net")]
        except OSError:
            return cls(socket.gethostname(), os.getpid(), "")
        return cls(" ".join([boot, *spaces]), os.getpid(), _stat(os.getpid())[1])

    def state(self) -> ProcessState:
        """What the kernel says about the process; `unknown` from another machine or without /proc."""
        if not self.started or self.machine != Process.here().machine:
            return "unknown"
        try:
            letter, started = _stat(self.pid)
        except OSError:
            return "gone"
        if started != self.started or letter in "ZX":
            return "gone"
        return "stopped" if letter == "T" else "running"


def _stat(pid: int) -> tuple[str, str]:
    """State and start time. The name before them is in parentheses and may contain anything."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return fields[0], fields[19]
