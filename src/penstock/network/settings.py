"""Configure IPv6 and TCP in a host's network namespace, through /proc/sys."""

from __future__ import annotations

from pathlib import Path

WINDOW_LIMIT_BYTES = 64 * 1024 * 1024
"""The least limit on a TCP connection's window each way: several times what 1 Gbit/s has in flight in 100 ms."""


def without_ipv6() -> None:
    """Turns off IPv6 in the calling thread's namespace before a device is up, so that only the job sends frames."""
    for where in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{where}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")


def with_large_windows() -> None:
    """Lets TCP in the calling thread's namespace have as much data in flight as a fast, distant link takes.

    Hosts that use such links are tuned the same way. The kernel's default send buffer of 4 MiB would limit 1 Gbit/s to
    a third at a round trip of 100 ms. No memory is used before it is needed.
    """
    for name in ("tcp_wmem", "tcp_rmem"):
        setting = Path("/proc/sys/net/ipv4") / name
        least, usual, most = setting.read_text().split()
        setting.write_text(f"{least} {usual} {max(int(most), WINDOW_LIMIT_BYTES)}")
