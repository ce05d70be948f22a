"""TAP devices: Ethernet frames that a host sends are read here, and frames written here are received by the host."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

from penstock.network.namespaces import within

DEVICE = Path("/dev/net/tun")
_DROPPED_OUT = 11  # a column of /proc/net/dev

_TUNSETIFF = 0x400454CA
_TAP, _WITHOUT_HEADER = 0x0002, 0x1000
_SIOCSIFTXQLEN = 0x8943
_UNREAD_FRAMES = 10_000
"""The frames that a device queues until they are read.

The default of 500 lasts less than 7 ms at 1gbit, and further frames are lost.
"""


def open_tap(name: str, namespace: Path | None) -> int:
    """Create a device in a namespace (None: the caller's) and return its descriptor; closing it removes the device.
    Raises OSError: there are no TAP devices here, or using them is not allowed."""

    def create() -> int:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _WITHOUT_HEADER))
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFTXQLEN, struct.pack("16si20x", name.encode(), _UNREAD_FRAMES))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return create() if namespace is None else within(namespace, create)


def open_counters(namespace: Path) -> int:
    """Return a descriptor of the counters of a namespace's devices, for `count_unread`."""
    return within(namespace, lambda: os.open("/proc/thread-self/net/dev", os.O_RDONLY | os.O_CLOEXEC))


def count_unread(counters: int, name: str) -> int:
    """Return how many frames a device has dropped because they were not read in time; 0 if there is no such device."""
    values = os.pread(counters, 1 << 16, 0).decode().partition(f"{name}:")[2].split()
    return int(values[_DROPPED_OUT]) if values else 0
