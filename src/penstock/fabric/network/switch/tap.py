"""TAP devices: what a host sends on one is read here as Ethernet frames, and what is written here it receives."""

from __future__ import annotations

import fcntl
import os
import struct
from pathlib import Path

from penstock.fabric.network.inside import within

DEVICE = Path("/dev/net/tun")

_TUNSETIFF = 0x400454CA
_TAP, _WITHOUT_HEADER = 0x0002, 0x1000


def open_tap(name: str, namespace: Path | None) -> int:
    """A descriptor of a new device in a namespace (None: the caller's); the device lives as long as it is open.

    Raises:
        OSError: there is no TAP here, or it may not be used.
    """

    def make() -> int:
        descriptor = os.open(DEVICE, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _TAP | _WITHOUT_HEADER))
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    return make() if namespace is None else within(namespace, make)
