"""Holds the processes of one host to a share of one core by stopping and continuing them, where the kernel does not.

This file is run as a program of its own, so it needs nothing but the standard library.

It is an account. What the host's processes use is taken from it, by the kernel's own count of their processor time;
what their share gives is added as time passes, but not beyond what a period gives, so that idling saves up nothing. In
the red they are stopped, all of them; as soon as they have what they are to use in one period, they are continued. It
sees late what they have used, and then they stop for longer: in the mean they never get more than their share.

A process that begins before it is seen is charged then. One that begins and ends unseen is charged when its parent
has waited for it, since the parent's count of its children grows; only children that nobody waits for escape.
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
"""Of stopping and continuing. Longer than a cgroup's (holdback.py): each turn costs a look at all processes."""
LEAST_SECONDS = 0.001
"""Between two looks."""
FOREIGN_LOOKS = 5
"""After so many lists of all processes, those of other namespaces are looked at again: they may have come over."""

_TICKS = os.sysconf("SC_CLK_TCK")


class Process(NamedTuple):
    start: int
    parent: int
    state: str
    seconds: float
    """Processor time: of all its threads, and of the children that it has waited for."""


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
        """Finds the processes that there are."""
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
        """Reads what those that are known have used. One that has ended is known until its parent has waited for it."""
        before = self.members
        self.members = {pid: process for pid in before if (process := _process(pid)) is not None}
        for pid, process in before.items():
            now = self.members.get(pid)
            if (now is None or (process.start and now.start != process.start)) and not self._counted(process, before):
                self._gone_seconds += process.seconds

    def _counted(self, process: Process, before: dict[int, Process]) -> bool:
        """Whether what it used is in the count of a parent that is still here, or of the parent's, and so on."""
        while process.parent not in self.members:
            if process.parent not in before:
                return False
            process = before[process.parent]
        return True

    @property
    def seconds(self) -> float:
        """Used so far by all that there are and were."""
        return self._gone_seconds + sum(process.seconds for process in self.members.values())

    def stop(self) -> bool:
        """Stops those that run. False if there were none: then nothing can begin another process any more."""
        running = {pid for pid, process in self.members.items() if process.state not in "TZ"}
        _send(signal.SIGSTOP, running)
        return bool(running)

    def go(self) -> None:
        """Continues all."""
        _send(signal.SIGCONT, self.members.keys())

    def admit(self) -> None:
        """Continues those that stopped themselves, as `holdback.Signals` has them do before their first instruction."""
        _send(signal.SIGCONT, {pid for pid, process in self.members.items() if process.state == "T"})


def _namespace(pid: int) -> tuple[int, int] | None:
    try:
        status = os.stat(f"/proc/{pid}/ns/net")
    except OSError:  # it has ended
        return None
    return status.st_dev, status.st_ino


def _process(pid: int) -> Process | None:
    """None if there is none any more."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
        own = time.clock_gettime(~pid << 3 | 2)  # the clock of another process, as clock_getcpuclockid(3) makes it
    except OSError:
        return None
    children = int(fields[13]) + int(fields[14])
    return Process(int(fields[19]), int(fields[1]), fields[0], own + children / _TICKS)


def _send(number: signal.Signals, processes: Set[int]) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def hold(host: Host, share: float, maker: int) -> None:
    """Does so until the maker has ended, or SIGTERM comes."""
    most = share * PERIOD_SECONDS
    enough = most * (1 - share)  # with what comes in while it is used, a whole period's
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
            # A parent counts its children in ticks, so that the sum may fall by less than one when a child has ended.
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
                # What is told to stop while it begins another process does both, so it is looked at again, and soon;
                # but not for as long as one waits in the kernel, where it does not stop.
                wait, pause = pause, 2 * pause
            else:
                wait = (enough - account) / share
            time.sleep(min(max(wait, LEAST_SECONDS), PERIOD_SECONDS))
    finally:
        host.go()


def main(namespace: str, share: float, maker: int) -> int:
    for number in (signal.SIGINT, signal.SIGHUP):  # not ours: the maker's keeper ends us
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    os.chdir("/")
    with contextlib.suppress(OSError):  # what comes late must be made good by a longer stop
        os.setpriority(os.PRIO_PROCESS, 0, -20)
    host = Host(Path(namespace))
    os.write(1, b"ready\n")
    os.close(1)
    hold(host, share, maker)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], float(sys.argv[2]), int(sys.argv[3])))
