"""Run work in a network namespace without a separate process: a thread joins the namespace, works, and ends.

And find out what keeps a machine from having them, before anything is created.

Each thread has its own network namespace, which the processes that it starts inherit.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from penstock.network.reaper import tool

T = TypeVar("T")
_NETWORK = 0x40000000  # CLONE_NEWNET


def within(namespace: Path | None, work: Callable[[], T]) -> T:
    """Run `work` in the namespace with this file, or in a temporary one; return or raise what it does. Raise OSError:
    the namespace cannot be joined or created."""

    def run() -> T:
        libc = ctypes.CDLL(None, use_errno=True)  # Python has os.setns and os.unshare only from 3.12 on
        if namespace is None:
            failed = libc.unshare(_NETWORK)
        else:
            with namespace.open("rb", buffering=0) as file:
                failed = libc.setns(file.fileno(), _NETWORK)
        if failed:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), None if namespace is None else str(namespace))
        return work()

    with ThreadPoolExecutor(1, "penstock in a namespace") as thread:
        return thread.submit(run).result()


# -- what hosts' namespaces are set to --------------------------------------------------------------------------------

WINDOW_LIMIT_BYTES = 64 * 1024 * 1024
"""The least limit on a TCP connection's window each way: several times what 1 Gbit/s has in flight in 100 ms."""


def set_up() -> None:
    """Prepare the calling thread's namespace, before a device is up.

    IPv6 is turned off, so that only the job sends frames. TCP may have as much data in flight as a fast, distant link
    takes; hosts that use such links are tuned the same way. The kernel's default send buffer of 4 MiB would limit 1
    Gbit/s to a third at a round trip of 100 ms. No memory is used before it is needed.
    """
    for scope in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{scope}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")
    for name in ("tcp_wmem", "tcp_rmem"):
        setting = Path("/proc/sys/net/ipv4") / name
        minimum, default, maximum = setting.read_text().split()
        setting.write_text(f"{minimum} {default} {max(int(maximum), WINDOW_LIMIT_BYTES)}")


# -- what a machine lacks for them -------------------------------------------------------------------------------------

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_PROBES = (
    ("bridge", "ip link add name probe type bridge", "CONFIG_BRIDGE", "bridge"),
    ("veth", "ip link add name one type veth peer name two", "CONFIG_VETH", "veth"),
    ("tbf", "tc qdisc add dev lo root tbf rate 100mbit burst 16kb limit 1mb", "CONFIG_NET_SCH_TBF", "sch_tbf"),
)
"""What the kernel needs, a command that tests it, the kernel option, and its module."""


def why_not() -> str | None:
    """Explain why no hosts can be created here and what to do about it; None if they can. Leaves nothing behind."""
    if sys.platform != "linux":
        return f"emulated hosts are network namespaces, which only Linux has; this is {sys.platform}"
    if os.geteuid() != 0:
        return f"emulated hosts need root; this is user {os.geteuid()}: run it with sudo"
    lacking = [name for name, bit in _CAPABILITIES.items() if not _effective_capabilities() >> bit & 1]
    if lacking:
        return f"emulated hosts need {' and '.join(lacking)}: run the container with --privileged, or on the host"
    for name in ("ip", "tc"):
        if not Path(tool(name)).exists():
            return f"there is no `{name}` on this machine: install iproute2 (apt-get install iproute2)"
    if not Path("/proc/self/ns/net").exists():
        return "the kernel has no network namespaces: it needs CONFIG_NET_NS"
    try:
        return within(None, _probe)
    except OSError as error:
        return f"no network namespace can be made ({error.strerror}): if this is a container, run it with --privileged"


def _effective_capabilities() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _probe() -> str | None:
    """Try each requirement in the calling thread's namespace."""
    for kind, command, option, module in _PROBES:
        program, *arguments = command.split()
        completed = subprocess.run([tool(program), *arguments], capture_output=True, text=True, check=False)
        if completed.returncode:
            error = " ".join(completed.stderr.split())
            return f"the kernel cannot make a {kind} ({error}): `modprobe {module}`, or a kernel with {option}"
    return None
