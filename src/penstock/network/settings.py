"""Sets IPv6 and TCP in a host's network namespace, through /proc/sys."""

from __future__ import annotations

from pathlib import Path

from penstock.errors import ArgumentError

MOST_WINDOW_BYTES = 64 * 1024 * 1024
"""Of a host's TCP connection in each direction, at least: several times what 1 Gbit/s has under way in 100 ms."""


def without_ipv6() -> None:
    """In the namespace of the calling thread, before a device is up: no frames but the job's."""
    for where in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{where}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")


def with_large_windows() -> None:
    """In the namespace of the calling thread: TCP may have as much under way as a fast link far away takes.

    As on hosts that are tuned for such links. The kernel's usual 4 MiB to send from would hold 1 Gbit/s over 100 ms
    there and back to a third. No memory is taken before it is needed.
    """
    for name in ("tcp_wmem", "tcp_rmem"):
        setting = Path("/proc/sys/net/ipv4") / name
        least, usual, most = setting.read_text().split()
        setting.write_text(f"{least} {usual} {max(int(most), MOST_WINDOW_BYTES)}")


def check_congestion_control(name: str) -> None:
    try:
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return
    if name not in known:
        raise ArgumentError(f"the kernel has no congestion control {name!r}: give one of {', '.join(known)}")
