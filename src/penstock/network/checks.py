"""Find out what keeps a machine from emulating hosts, before anything is created."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from penstock.network.keeper import tool
from penstock.network.namespaces import within

_CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
_PROBES = (
    ("bridge", "ip link add name probe type bridge", "CONFIG_BRIDGE", "bridge"),
    ("veth", "ip link add name one type veth peer name two", "CONFIG_VETH", "veth"),
    ("tbf", "tc qdisc add dev lo root tbf rate 100mbit burst 16kb limit 1mb", "CONFIG_NET_SCH_TBF", "sch_tbf"),
)
"""What the kernel needs, a command that tests it, the kernel option, and its module."""


def why_not() -> str | None:
    """Explains why no hosts can be created here and what to do about it; None if they can. Leaves nothing behind."""
    if sys.platform != "linux":
        return f"emulated hosts are network namespaces, which only Linux has; this is {sys.platform}"
    if os.geteuid() != 0:
        return f"emulated hosts need root; this is user {os.geteuid()}: run it with sudo"
    lacking = [name for name, bit in _CAPABILITIES.items() if not _effective() >> bit & 1]
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


def _effective() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


def _probe() -> str | None:
    """Tries each requirement in the calling thread's namespace."""
    for what, command, option, module in _PROBES:
        program, *arguments = command.split()
        done = subprocess.run([tool(program), *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            said = " ".join(done.stderr.split())
            return f"the kernel cannot make a {what} ({said}): `modprobe {module}`, or a kernel with {option}"
    return None
