"""Run work in a network namespace without a separate process: a thread joins the namespace, works, and ends.

Each thread has its own network namespace, which the processes that it starts inherit.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
_NETWORK = 0x40000000  # CLONE_NEWNET


def within(namespace: Path | None, work: Callable[[], T]) -> T:
    """Runs `work` in the namespace with this file, or in a temporary one; returns or raises what it does. Raises
    OSError: the namespace cannot be joined or created."""

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
    """Prepares the calling thread's namespace, before a device is up.

    IPv6 is turned off, so that only the job sends frames. TCP may have as much data in flight as a fast, distant link
    takes; hosts that use such links are tuned the same way. The kernel's default send buffer of 4 MiB would limit 1
    Gbit/s to a third at a round trip of 100 ms. No memory is used before it is needed.
    """
    for where in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{where}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")
    for name in ("tcp_wmem", "tcp_rmem"):
        setting = Path("/proc/sys/net/ipv4") / name
        least, usual, most = setting.read_text().split()
        setting.write_text(f"{least} {usual} {max(int(most), WINDOW_LIMIT_BYTES)}")
