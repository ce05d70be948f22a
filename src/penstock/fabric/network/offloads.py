"""What an interface's driver does in place of the kernel, asked and set by ethtool's own system call.

A host may have no ethtool, and these few need no more than a request number each (linux/ethtool.h).
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping

_SIOCETHTOOL = 0x8946
_REQUESTS = {  # name: (get, set)
    "rx-checksumming": (0x14, 0x15),
    "tx-checksumming": (0x16, 0x17),
    "scatter-gather": (0x18, 0x19),
    "tcp-segmentation-offload": (0x1E, 0x1F),
    "generic-segmentation-offload": (0x23, 0x24),
    "generic-receive-offload": (0x2B, 0x2C),
}


def offloads(interface: str) -> dict[str, bool]:
    """Which are on, by ethtool's names; one that cannot be asked is left out."""
    found = {}
    for name, (get, _) in _REQUESTS.items():
        with contextlib.suppress(OSError):
            found[name] = bool(_request(interface, get, 0))
    return found


def set_offloads(interface: str, wanted: Mapping[str, bool]) -> None:
    """Turns them on or off. Raises OSError for one that the interface has not, or that needs more rights."""
    for name, on in wanted.items():
        _request(interface, _REQUESTS[name][1], int(on))


def _request(interface: str, number: int, value: int) -> int:
    """Of the calling thread's network namespace."""
    data = ctypes.create_string_buffer(struct.pack("II", number, value), 8)
    request = struct.pack("16sP", interface.encode(), ctypes.addressof(data)).ljust(40, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    result: int = struct.unpack("II", data.raw)[1]
    return result
