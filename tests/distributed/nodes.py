"""Machines, as far as the network and the kernel's process table can tell: namespaces that are joined by a cable.

A node has its own host name, network, process ids and /etc/hosts, all of them unnamed: when its first process ends, the
kernel ends every other one and takes the rest down. That process reads a pipe, and so ends with the test, however that
ends. Files are shared, as on a cluster.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

_HOLD = 'mount --bind "$0" /etc/hosts && hostname "$1" && echo ready && exec cat'
_SPACES = ("--net", "--uts", "--mount", "--pid")


NAMES = ("node-a.cluster", "node-b.cluster")


@contextmanager
def two_machines(folder: Path, names: Sequence[str] = NAMES) -> Iterator[Nodes]:
    """Two machines for a test, which is skipped where there can be none. `folder` takes their files."""
    with ExitStack() as stack:
        try:
            nodes = stack.enter_context(Nodes(folder, names))
        except NodesError as reason:
            pytest.skip(str(reason))
        yield nodes


class NodesError(RuntimeError):
    """There can be none here; says why."""


class Nodes:
    """Two machines at 10.77.0.1 and 10.77.0.2, which know each other by `names`. Use it in a `with` block.

    A machine's own host name is the first part of its name, which only that machine understands: as for a pod.

    Raises:
        NodesError: this takes Linux, the right to make namespaces (root), and the tools of iproute2 and util-linux.
    """

    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        missing = [tool for tool in ("ip", "unshare", "nsenter", "hostname") if shutil.which(tool) is None]
        if missing or os.geteuid() != 0:
            raise NodesError(
                f"two machines need root and the command {missing[0]}" if missing else "only root can make them"
            )
        self.names = tuple(names)
        self._folder = folder
        self._holders: list[subprocess.Popen[str]] = []
        self._started: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []

    def __enter__(self) -> Self:
        known = [f"{address} {name}" for address, name in zip(self.addresses, self.names, strict=True)]
        try:
            for node, name in enumerate(self.names):
                host = name.partition(".")[0]
                lines = ["127.0.0.1 localhost", *known]
                lines[1 + node] += f" {host}"
                hosts = self._folder / f"hosts-{node}"
                hosts.write_text("\n".join([*lines, ""]))
                self._hold(host, hosts)
            ends = [["name", "cable", "netns", str(pid)] for pid in self.pids]
            _call("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for node, address in enumerate(self.addresses):
                _call(*self.enter(node), "ip", "address", "add", f"{address}/24", "dev", "cable")
                for device in ("lo", "cable"):
                    _call(*self.enter(node), "ip", "link", "set", device, "up")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def start(
        self, node: int, command: Sequence[str], folder: Path, environment: Mapping[str, str]
    ) -> subprocess.Popen[str]:
        """Starts a command on a machine. What it prints, and its errors, are to be read from `stdout`."""
        process = subprocess.Popen(
            [*self.enter(node), "env", "-C", str(folder), *command],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._started.append(process)
        return process

    def enter(self, node: int) -> list[str]:
        """What runs the command that follows it on a machine."""
        return ["nsenter", "--target", str(self.pids[node]), *_SPACES, "--"]

    def _hold(self, name: str, hosts: Path) -> None:
        holder = subprocess.Popen(
            ["unshare", *_SPACES, "--fork", "--kill-child", "--mount-proc", "sh", "-c", _HOLD, str(hosts), name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._holders.append(holder)
        assert holder.stdout is not None
        assert holder.stderr is not None
        if holder.stdout.readline() != "ready\n":
            raise NodesError(f"namespaces cannot be made here: {holder.stderr.read().strip()}")
        self.pids.append(int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text()))

    def _end(self) -> None:
        for holder in self._holders:
            holder.communicate("")  # closes the pipe that it reads
        for process in self._started:
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


def _call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodesError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
