"""Limit the processes of one host to a share of one core by stopping and continuing them, where the kernel cannot.

This file runs as its own program, so it needs only the standard library.

It keeps an account. The processor time that the host's processes use, as counted by the kernel, is debited. Their share
is credited as time passes, up to one period's worth, so idling saves nothing up. When the account is negative, all
processes are stopped; once it holds what they may use in one period, they are continued. Usage that is noticed late
makes the next stop longer, so on average they never get more than their share.

A process that runs before it is noticed is charged when it is. One that starts and ends unnoticed is charged when its
parent has waited for it, because it is then part of the parent's count for its children. Only children that nothing
waits for escape.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

PERIOD_SECONDS = 0.02
"""The period of stopping and continuing: longer than a cgroup's (holdback.py), as each turn looks at all processes."""
LEAST_SECONDS = 0.001
"""The least time between two looks."""
FOREIGN_LOOKS = 5
"""Processes of other namespaces are checked again after this many looks, because they may have moved here."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    start: int
    parent: int
    state: str
    seconds: float
    """Processor time of all its threads, and of the children that it has waited for."""


class Host:
    """The processes of a network namespace."""

    def __init__(self, namespace: Path) -> None:
        status = os.stat(namespace)
        self._place = status.st_dev, status.st_ino
        self._foreign: set[int] = set()
        self._looks = 0
        self._gone_seconds = 0.0
        self.members: dict[int, Process] = {}

    def look(self) -> None:
        """Finds the current processes."""
        self._looks += 1
        if self._looks % FOREIGN_LOOKS == 0:
            self._foreign.clear()
        there = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        self._foreign &= there
        for pid in there - self._foreign - self.members.keys():
            if _namespace(pid) == self._place:
                self.members[pid] = Process(0, 0, "", 0.0)
            else:
                self._foreign.add(pid)
        self.count()

    def count(self) -> None:
        """Reads what the known processes have used. A dead one stays known until its parent has waited for it."""
        before = self.members
        self.members = {pid: process for pid in before if (process := _process(pid)) is not None}
        for pid, process in before.items():
            now = self.members.get(pid)
            if (now is None or (process.start and now.start != process.start)) and not self._counted(process, before):
                self._gone_seconds += process.seconds

    def _counted(self, process: Process, before: dict[int, Process]) -> bool:
        """Whether its usage is in the count of its parent, or of the nearest ancestor that is still here."""
        while process.parent not in self.members:
            if process.parent not in before:
                return False
            process = before[process.parent]
        return True

    @property
    def seconds(self) -> float:
        """Processor time used so far by all processes, past and present."""
        return self._gone_seconds + sum(process.seconds for process in self.members.values())

    def stop(self) -> bool:
        """Stops the running processes. Returns False if there were none, after which none can start another process."""
        running = {pid for pid, process in self.members.items() if process.state not in "TZ"}
        _send(signal.SIGSTOP, running)
        return bool(running)

    def go(self) -> None:
        """Continues all processes."""
        _send(signal.SIGCONT, self.members.keys())

    def admit(self) -> None:
        """Continues processes that stopped themselves before their first instruction, as under `holdback.Signals`."""
        _send(signal.SIGCONT, {pid for pid, process in self.members.items() if process.state == "T"})


def _namespace(pid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return None
    return status.st_dev, status.st_ino


def _process(pid: int) -> Process | None:
    """Reads a process's state; None if it no longer exists."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        own = time.clock_gettime(~pid << 3 | 2)  # the process's clock, as by clock_getcpuclockid(3)
    except OSError:
        return None
    children = int(fields[13]) + int(fields[14])
    return Process(int(fields[19]), int(fields[1]), fields[0], own + children / _TICKS)


def _send(number: signal.Signals, processes: Set[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def hold(host: Host, share: float, maker: int) -> None:
    """Limits the host until the maker has ended, or until SIGTERM."""
    most = share * PERIOD_SECONDS
    enough = most * (1 - share)  # together with what is credited while it is used up, one period's worth
    account, highest, then = most, host.seconds, time.monotonic()
    next_look = then
    stopped, pause = False, 0.0
    try:
        while os.getppid() == maker:
            now = time.monotonic()
            if stopped or now >= next_look:
                host.look()
                next_look = now + PERIOD_SECONDS
            else:
                host.count()
            # A parent counts its children in ticks, so the sum may drop by less than one tick when a child ends.
            used = max(host.seconds - highest, 0.0)
            account = min(account + share * (now - then) - used, most)
            highest, then = highest + used, now
            if not stopped and account < 0:
                stopped, pause = True, LEAST_SECONDS
            elif stopped and account >= enough:
                host.go()
                stopped = False
            if not stopped:
                host.admit()
                wait = account if host.members else PERIOD_SECONDS
            elif host.stop():
                # A process that is stopped while it starts another does both, so look again soon, but less and less
                # often: a process that waits in the kernel does not stop.
                wait, pause = pause, 2 * pause
            else:
                wait = (enough - account) / share
            time.sleep(min(max(wait, LEAST_SECONDS), PERIOD_SECONDS))
    finally:
        host.go()


def main(namespace: str, share: float, maker: int) -> int:
    for number in (signal.SIGINT, signal.SIGHUP):  # not meant for us: the maker's keeper ends us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.chdir("/")
    with contextlib.suppress(OSError):  # without priority, stops are just longer
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    host = Host(Path(namespace))
    os.write(1, b"ready\n")
    os.close(1)
    hold(host, share, maker)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
