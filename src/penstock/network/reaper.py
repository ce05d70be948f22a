"""Remove an emulation when its maker ends, no matter how, even if it is killed.

This file also runs as its own program, in its own session, so it needs only the standard library.

Outside its own processes, an emulation leaves only names of network namespaces, `penstock-PID-START-NUMBER-h0`, ...,
`-switch`. PID and START (the start time in clock ticks since boot) are the maker's, so the name alone shows whether the
maker is alive, and no file is needed. Devices, queues and addresses disappear with the namespaces. A slow host may also
have a cgroup, `penstock-PID-START-NUMBER-h0-cpu`.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

FOLDER = Path("/var/run/netns")
"""Where `ip netns` keeps names."""
GROUPS = Path("/sys/fs/cgroup")
"""Where every distribution mounts cgroups."""
PATHS = (*os.environ.get("PATH", os.defpath).split(os.pathsep), "/usr/sbin", "/sbin", "/usr/local/sbin")
"""Where to look for `ip` and `tc`, which are often not on a user's PATH."""
MARK = "PENSTOCK_FABRIC"
"""The environment variable that names the emulation in each of its processes."""
SECONDS = 10.0
"""How long processes get to die of SIGKILL; after that, their namespaces are deleted anyway."""

_NAME = re.compile(r"(penstock-\d+-\d+-\d+)-(?:h\d+|switch)")
_GROUP = re.compile(r"(penstock-\d+-\d+-\d+)-h\d+-cpu")


def list_namespaces(emulation: str | None = None) -> list[str]:
    """Return the namespaces of an emulation, or of all emulations."""
    entries = sorted(os.listdir(FOLDER)) if FOLDER.exists() else []
    matches = [match for name in entries if (match := _NAME.fullmatch(name))]
    return [match[0] for match in matches if emulation in (None, match[1])]


def list_cgroups(emulation: str | None = None) -> list[Path]:
    """Return the cgroups of an emulation, or of all emulations, wherever in the hierarchies they were created."""
    cgroups = []
    for _, mount in group_mounts():
        for folder, names, _ in os.walk(mount):
            matches = [match for name in names if (match := _GROUP.fullmatch(name))]
            cgroups += [Path(folder, match[0]) for match in matches if emulation in (None, match[1])]
    return cgroups


def group_mounts() -> list[tuple[int, Path]]:
    """Return the cgroup hierarchies that divide processor time, by version."""
    mounts = [(2, mount) for mount in (GROUPS, GROUPS / "unified") if "cpu" in read_words(mount / "cgroup.controllers")]
    return [*mounts, (1, GROUPS / "cpu")] if (GROUPS / "cpu/cgroup.procs").exists() else mounts


def read_words(path: Path) -> list[str]:
    """Return the words in a kernel file; none if it does not exist."""
    try:
        return path.read_text().split()
    except OSError:
        return []


def maker_lives(emulation: str) -> bool:
    """Whether the process that made the emulation is still running."""
    pid, start = emulation.split("-")[1:3]
    return start_ticks(int(pid)) == int(start)


def start_ticks(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not exist or has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def remove(emulation: str) -> list[str]:
    """Kill every process of an emulation, delete its namespaces and cgroups, and return the names deleted.

    This repeats until nothing is left, because a command that the maker had started may create more in the meantime.
    """
    removed: list[str] = []
    deadline = time.monotonic() + SECONDS
    quiet = 0
    while quiet < 2:
        names, groups = list_namespaces(emulation), list_cgroups(emulation)
        processes = set(_processes(emulation, names, groups))
        late = time.monotonic() > deadline
        if not names and not groups and (not processes or late):
            quiet += 1
        else:
            quiet = 0
            _lift_limits(groups)
            for pid in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if not processes or late:
                removed += [name for name in names if _delete(name)]
                removed += [group.name for group in groups if _delete_group(group)]
                if late:
                    break
                if not groups:  # a process may still be ending in a cgroup
                    continue
        time.sleep(0.02)
    return removed


def _processes(emulation: str, names: Iterable[str], groups: Iterable[Path]) -> Iterator[int]:
    """Yield the processes in the namespaces and cgroups, and those that carry the mark."""
    inodes = {inode for name in names if (inode := _inode(FOLDER / name))}
    inodes.discard(_inode(Path("/proc/self/ns/net")))  # a name that was never attached to a namespace, or our own
    group_pids = {pid for group in groups for pid in read_words(group / "cgroup.procs")}
    mark = f"{MARK}={emulation}".encode()
    for pid in os.listdir("/proc"):
        if not pid.isdigit() or int(pid) == os.getpid():
            continue
        environment = b""
        with contextlib.suppress(OSError):  # it has ended
            environment = Path(f"/proc/{pid}/environ").read_bytes()
        if pid in group_pids or _inode(Path(f"/proc/{pid}/ns/net")) in inodes or mark in environment.split(b"\0"):
            yield int(pid)


def _inode(path: Path) -> tuple[int, int] | None:
    """Return the device and inode that identify a namespace; None if it no longer exists."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _lift_limits(groups: Iterable[Path]) -> None:
    """Lift the cgroups' limits: ending a process takes time; with 600 MB at a share of 0.1%, more than `SECONDS`."""
    for group in groups:
        for name, unlimited in (("cpu.max", "max"), ("cpu.cfs_quota_us", "-1")):
            if (group / name).exists():
                with contextlib.suppress(OSError):  # deleted in the meantime
                    (group / name).write_text(unlimited)


def tool(name: str) -> str:
    """Return the path of a system program, or where it would be if it is not installed."""
    return shutil.which(name, path=os.pathsep.join(PATHS)) or f"/usr/sbin/{name}"


def _delete(name: str) -> bool:
    return subprocess.run([tool("ip"), "netns", "delete", name], capture_output=True, check=False).returncode == 0


def _delete_group(group: Path) -> bool:
    with contextlib.suppress(OSError):  # a process is still ending in it
        group.rmdir()
        return True
    return False


def main(emulation: str, maker: int) -> int:
    """Wait until the maker closes our standard input or ends; remove its emulation; return 0 if nothing is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.chdir("/")
    waiting = select.poll()
    waiting.register(0, select.POLLIN | select.POLLHUP)
    try:
        # A process forked from the maker may hold the pipe open longer; this notices that the maker itself has ended.
        waiting.register(os.pidfd_open(maker), select.POLLIN)
    except ProcessLookupError:
        remove(emulation)
        return 0
    except OSError:  # the kernel or sandbox has no pidfd: the pipe must do
        pass
    os.write(1, b"ready\n")
    os.close(1)
    if os.getppid() == maker:
        waiting.poll()
    remove(emulation)
    return 1 if list_namespaces(emulation) or list_cgroups(emulation) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
