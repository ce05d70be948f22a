"""What an interface's driver does in place of the kernel, asked by ethtool's own system call.

A host may have no ethtool, and these few need no more than a request number each (linux/ethtool.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
_REQUESTS = {
    "rx-checksumming": 0x14,
    "tx-checksumming": 0x16,
    "scatter-gather": 0x18,
    "tcp-segmentation-offload": 0x1E,
    "generic-segmentation-offload": 0x23,
    "generic-receive-offload": 0x2B,
}


def offloads(interface: str) -> dict[str, bool]:
    """Which are on, by ethtool's names; one that cannot be asked is left out."""
    found = {}
    for name, number in _REQUESTS.items():
        with contextlib.suppress(OSError):
            found[name] = bool(_request(interface, number))
    return found


def _request(interface: str, number: int) -> int:
    """The answer in the calling thread's network namespace."""
    data = ctypes.create_string_buffer(struct.pack("II", number, 0), 8)
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(data)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    result: int = struct.unpack("II", data.raw)[1]
    return result
