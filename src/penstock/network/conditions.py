"""Describe a host in a run's record: its kernel, network settings and processor usage."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import platform
import re
import resource
import socket
import struct
import subprocess
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from penstock._base.process import cores
from penstock.network.reaper import tool

_SIOCGIFMTU, _SIOCETHTOOL = 0x8921, 0x8946
_OFFLOADS = {
    "rx-checksumming": 0x14,
    "tx-checksumming": 0x16,
    "scatter-gather": 0x18,
    "tcp-segmentation-offload": 0x1E,
    "generic-segmentation-offload": 0x23,
    "generic-receive-offload": 0x2B,
}
"""The requests of ethtool's system call (linux/ethtool.h), by ethtool's names; a host may lack the program."""


def environment(interface: str | None = None) -> dict[str, Any]:
    """Describe this host as far as its network is concerned; unknown values are None. Without `interface`, the one that
    the job uses is GLOO_SOCKET_IFNAME's, or the first one besides lo."""
    names = interfaces()
    device = interface or os.environ.get("GLOO_SOCKET_IFNAME") or next((name for name in names if name != "lo"), None)
    routes = _output("ip", "route", "show", "dev", device) if device else None
    match = re.search(r"congctl (?:lock )?(\S+)", routes or "")  # a route may name one of its own
    return {
        "host": socket.gethostname(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "congestion_control": match[1] if match else _setting("tcp_congestion_control"),
        "slow_start_after_idle": _setting("tcp_slow_start_after_idle"),
        "interface": device,
        "interfaces": names,
        "mtu": names.get(device) if device else None,
        "offloads": _offloads(device) if device is not None and device in names else None,
        "qdiscs": _output("tc", "-s", "qdisc", "show"),
        "cores": cores(),
        "load": list(os.getloadavg()),
    }


def interfaces() -> dict[str, int]:
    """Return the MTU of each interface in this process's network namespace."""
    # Not /sys/class/net: in a namespace entered without its own mount, that shows the machine's interfaces.
    mtus = {}
    with contextlib.suppress(OSError):
        for _, name in socket.if_nameindex():
            mtus[name] = int(struct.unpack_from("16si", _query(_SIOCGIFMTU, struct.pack("16s", name.encode())))[1])
    return mtus


def _query(request: int, data: bytes) -> bytes:
    """Return the kernel's answer about an interface in the calling thread's network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        return fcntl.ioctl(any_socket, request, data.ljust(40, b"\0"))


def _offloads(interface: str) -> dict[str, bool]:
    """Return what an interface's driver does instead of the kernel, leaving out what cannot be queried."""
    offloads = {}
    for name, request in _OFFLOADS.items():
        data = ctypes.create_string_buffer(struct.pack("II", request, 0), 8)
        with contextlib.suppress(OSError):
            _query(_SIOCETHTOOL, struct.pack("16sP", interface.encode(), ctypes.addressof(data)))
            offloads[name] = bool(struct.unpack("II", data.raw)[1])
    return offloads


def _setting(name: str) -> str | None:
    try:
        return Path("/proc/sys/net/ipv4", name).read_text().strip()
    except OSError:
        return None


def _output(program: str, *arguments: str) -> str | None:
    """Return what a program prints; None if it does not exist or fails."""
    try:
        completed = subprocess.run([tool(program), *arguments], capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return completed.stdout if completed.returncode == 0 else None


def cpu_usage() -> dict[str, Any]:
    """Return the processor time used so far, for `cpu_since`."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": usage.ru_utime + usage.ru_stime,
        "wall_seconds": time.monotonic(),
        "voluntary_switches": usage.ru_nvcsw,
        "involuntary_switches": usage.ru_nivcsw,
        "machine": _machine_time(),
    }


def cpu_since(before: dict[str, Any], now: dict[str, Any] | None = None) -> dict[str, float | int | None]:
    """Return the usage between two moments, for the record: user and system time of all threads of this process, and
    how often it waited and was preempted; `busy` and `steal` are fractions (0..1) of all cores of the machine, None if
    the system does not report them."""
    now = now or cpu_usage()
    deltas = {name: now[name] - before[name] for name in now if name != "machine"}
    busy = steal = None
    if now["machine"] and before["machine"]:
        ticks, stolen, total = (new - old for new, old in zip(now["machine"], before["machine"], strict=True))
        if total > 0:
            busy, steal = min(ticks / total, 1.0), min(max(stolen / total, 0.0), 1.0)  # some count it backwards
    return {**deltas, "busy": busy, "steal": steal}


def _machine_time() -> tuple[int, int, int] | None:
    """Return the ticks of all cores together: busy (including stolen by the hypervisor), stolen alone, and total."""
    try:
        # user nice system idle iowait irq softirq steal; guests' time is included in user.
        ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        user, nice, system, idle, waiting, hard, soft, steal = ticks
    except (OSError, ValueError):
        return None
    busy = user + nice + system + hard + soft + steal
    return busy, steal, busy + idle + waiting
