"""Addresses for an emulation: a subnet that nothing else here uses, claimed until it is released."""

from __future__ import annotations

import errno
import ipaddress
import json
import socket
import subprocess

from penstock._base.errors import FabricError
from penstock.network.keeper import tool

ALL = ipaddress.IPv4Network("10.64.0.0/10")
"""The range from which subnets are taken."""


def subnet(number: int) -> ipaddress.IPv4Network:
    """Returns the subnet with this number, which has addresses for 254 hosts."""
    return ipaddress.IPv4Network((int(ALL.network_address) + 256 * number, 24))


def claim() -> tuple[int, socket.socket]:
    """Returns the number of a subnet that is not in use, and the socket that claims it until it is closed.

    Neither this machine nor another emulation uses the subnet. The claim is the name of an abstract socket, which the
    kernel gives to one process only and frees when that process ends.
    """
    used = routes()
    for number in range(ALL.num_addresses // 256):
        network = subnet(number)
        if any(network.overlaps(other) for other in used):
            continue
        held = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            held.bind(f"\0penstock-fabric-{network.network_address}")
        except OSError as error:
            held.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return number, held
    raise FabricError(f"every subnet of {ALL} is in use: stop an emulation, or run `penstock fabric clean`")


def routes() -> list[ipaddress.IPv4Network]:
    """Returns the networks to which this machine has specific routes."""
    line = [tool("ip"), "-4", "-json", "route", "show", "table", "all"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    given = [str(route.get("dst", "default")) for route in json.loads(done.stdout or "[]")]
    return [ipaddress.IPv4Network(target, strict=False) for target in given if target[0].isdigit()]
