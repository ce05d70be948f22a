"""Emulate hosts with a slow processor: all processes of one host together get at most a share of ONE core's time.

A quarter of a core is the same on a machine with two cores or a hundred. It is a limit, not a guarantee: if the machine
has less to spare, a host gets less.

The kernel enforces it through a cgroup quota, a number of microseconds of processor time per period on any cores.

The period is short, because otherwise a host is not slow but stalls: whatever fits into one quota runs at full speed,
and the rest waits for the next. At 25%, 3 ms of work should take 12 ms, and 10 ms of work 40 ms. Measured, from the 5th
to the 95th percentile:

    period     100 ms       50 ms        20 ms        10 ms         5 ms
     3 ms    3 - 78 ms    3 - 41 ms    3 - 18 ms   10 - 18 ms   10 - 14 ms
    10 ms   10 - 85 ms   10 - 48 ms   40 - 40 ms   40 - 40 ms   40 - 40 ms

The kernel reads its clock every 4 ms there, so even shorter periods gain little. On a crowded machine (a load of 50 on
two cores), 5 ms was the first period that did not deliver the full share: 22% instead of 25%. A quota is at least 1 ms,
so the period grows for shares below 10%.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock._base.errors import ArgumentError, FabricError
from penstock.network import reaper
from penstock.network.quantities import by_host

PERIOD_US = 10_000
MIN_QUOTA_US = 1000
"""The smallest quota that the kernel accepts."""
MIN_SHARE = 0.001
"""The smallest quota divided by the longest period that the kernel accepts, which is one second."""

_SHARE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(%?)", re.ASCII)


def parse_slow(texts: str | Sequence[str], hosts: int) -> dict[int, float]:
    """Return each slow host's share of one core, from texts like "2=25%" or "0=0.5, 3=10%", sorted by host. Raise
    ArgumentError as `by_host` does, or if a share is invalid."""
    pairs = [pair for text in ((texts,) if isinstance(texts, str) else texts) for pair in text.split(",")]
    slow = by_host(pairs, hosts, "its share of one core: pass one like 2=25% or 2=0.25", _share)
    for host, share in slow.items():
        if not 0 < share <= 1:
            expected = f"pass more than 0 and at most 1 (or 100%), like {host}=25% or {host}=0.25"
            raise ArgumentError(f"host {host} is given {share:g} ({100 * share:g}%) of a core: {expected}")
        if share < MIN_SHARE:
            limit = "but the least that can be enforced is 0.1%"
            raise ArgumentError(f"host {host} is given {100 * share:g}% of a core, {limit}")
    return dict(sorted(slow.items()))


def _share(text: str) -> float:
    match = _SHARE.fullmatch(text)
    if match is None:
        raise ArgumentError(f"{text!r} is not a share of a core: pass one like 25% or 0.25")
    return float(match[1]) / (100 if match[2] else 1)


def quota(share: float) -> tuple[int, int]:
    """Return a cgroup's quota: microseconds of processor time, and the period in which they may be used."""
    period = max(PERIOD_US, math.ceil(MIN_QUOTA_US / share))
    return max(round(share * period), MIN_QUOTA_US), period


VERSIONS = (2, 1)
"""Versions of cgroups, best first."""
_FILES = {2: "cpu.max", 1: "cpu.cfs_quota_us"}
"""The file that holds the quota, by version."""


class CpuLimiter:
    """A cgroup for each slow host of one emulation; the emulation's reaper removes them.

    A command joins its host's cgroup before it enters the host, and its children are born in it.

    Attributes:
        name: for people, and for a run's record.
    """

    def __init__(self, emulation: str, slow: Mapping[int, float], version: int) -> None:
        """Create the cgroups, before the hosts. Raise OSError: it does not work on this machine, and why. Nothing is
        left behind."""
        self.name = f"cgroup v{version} ({_FILES[version]})"
        self._version = version
        self._folders: dict[int, Path] = {}
        parent = self._parent()
        try:
            for host, share in slow.items():
                folder = parent / f"{emulation}-h{host}-cpu"
                folder.mkdir()
                self._folders[host] = folder
                for name, value in self._limits(share):
                    (folder / name).write_text(value)
        except OSError:
            for folder in self._folders.values():
                folder.rmdir()
            raise

    def command(self, host: int, prefix: Sequence[str], argv: Sequence[str]) -> list[str]:
        """Return the command that runs `argv` and its children on a slow host, throttled from the first instruction,
        after the words that enter the host."""
        # 0 means the writer itself. Not inside the host: `ip netns exec` hides the cgroups there.
        join = 'echo 0 > "$0" && exec "$@"'
        return ["/bin/sh", "-c", join, str(self._folders[host] / "cgroup.procs"), *prefix, *argv]

    def _parent(self) -> Path:
        """Return the cgroup to create them in: our own or an ancestor, so that our own limits include the hosts."""
        mount = dict(reaper.group_mounts()).get(self._version)
        if mount is None:
            raise OSError(f"no cgroup v{self._version} with the cpu controller is mounted in {reaper.GROUPS}")
        folder = mount / _own_group(self._version).lstrip("/")
        if ".." in folder.parts or not folder.is_dir():  # we are outside what is mounted here
            folder = mount
        # In version 2, a cgroup either delegates a controller or has processes. Making it delegate this one would
        # outlast us.
        while self._version == 2 and "cpu" not in reaper.read_words(folder / "cgroup.subtree_control"):
            if folder == mount:
                raise OSError(f"no cgroup up to {mount} delegates the cpu controller")
            folder = folder.parent
        return folder

    def _limits(self, share: float) -> list[tuple[str, str]]:
        """Return what to write into which files, in order."""
        microseconds, period = quota(share)
        if self._version == 2:
            return [(_FILES[2], f"{microseconds} {period}")]
        return [("cpu.cfs_period_us", str(period)), (_FILES[1], str(microseconds))]


def limit_cpu(emulation: str, slow: Mapping[int, float]) -> CpuLimiter:
    """Make the cgroups of the first version that works on this machine. Raise FabricError: none does, and why."""
    reasons = []
    for version in VERSIONS:
        try:
            return CpuLimiter(emulation, slow, version)
        except OSError as error:
            reasons.append(f"cgroup v{version} ({_FILES[version]}): {error}")
    raise FabricError(
        f"no host can be slowed on this machine: {'; '.join(reasons)}. A slow host needs a cgroup: run the container "
        "with --privileged, or omit --slow"
    )


def _own_group(version: int) -> str:
    """Return our cgroup's path in its hierarchy."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        if (version == 2 and number == "0") or (version == 1 and "cpu" in controllers.split(",")):
            return path
    return "/"
