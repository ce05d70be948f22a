"""How well a shaped link keeps its rate: one TCP connection between two emulated hosts, one message at a time.

    sudo python benchmarks/fabric/link_rate.py 100mbit 1gbit "1gbit mtu 9000"

For each size, prints the median and the fastest time, minus the time for 1 byte, relative to the message's bytes on
the wire divided by the rate; and the share of the machine's processor time that was used.
"""

from __future__ import annotations

import argparse
import json
import math
import socket
import statistics
import struct
import subprocess
import sys
import time

from penstock.network.conditions import cpu_since, cpu_usage
from penstock.network.link import Link
from penstock.network.machines import Machines
from penstock.network.parse import parse_link

SIZES = (1, 16 << 10, 64 << 10, 256 << 10, 1 << 20, 8 << 20)


def wire_bytes(link: Link, size: int) -> int:
    """A message's bytes on the wire if TCP fills its segments, without the acknowledgements that come back."""
    carried = round(link.goodput_ratio * link.frame_bytes)
    return size + math.ceil(size / carried) * (link.frame_bytes - carried)


def receive(address: str) -> None:
    with socket.create_server((address, 5000)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    buffer = bytearray(1 << 20)
    while head := connection.recv(8, socket.MSG_WAITALL):
        (left,) = struct.unpack("q", head)
        while left:
            left -= connection.recv_into(buffer, min(left, len(buffer)))
        connection.sendall(b"k")


def send(address: str, idle_seconds: float) -> None:
    connection = socket.create_connection((address, 5000))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    data, times = memoryview(bytes(SIZES[-1])), {}
    for size in SIZES:
        taken = []
        for _ in range(3 + max(6, min(60, (24 << 20) // size))):
            time.sleep(idle_seconds)
            start = time.perf_counter()
            connection.sendall(struct.pack("q", size))
            connection.sendall(data[:size])
            connection.recv(1)
            taken.append(time.perf_counter() - start)
        times[size] = taken[3:]
    print(json.dumps(times))


def measure(text: str, idle_seconds: float) -> None:
    link, me = parse_link(text), [sys.executable, __file__]
    with Machines(2, link) as machines:
        to = machines.addresses[1]
        with subprocess.Popen(machines.command(1, [*me, "--receive", to]), stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout is not None
            receiver.stdout.readline()
            before = cpu_usage()
            line = machines.command(0, [*me, "--send", to, "--idle", str(idle_seconds)])
            output = subprocess.run(line, check=True, capture_output=True).stdout
            busy = cpu_since(before)["busy"]
    times = {int(size): taken for size, taken in json.loads(output).items()}
    least = statistics.median(times.pop(1))
    cells = [f"1 B {least * 1e6:.0f} us"]
    for size, taken in times.items():
        ideal = wire_bytes(link, size) / link.bytes_per_second
        median, fastest = ((value - least) / ideal for value in (statistics.median(taken), min(taken)))
        cells.append(f"{size >> 10} KiB {median:.3f} ({fastest:.3f})")
    print(f"{text}: {', '.join(cells)}; processors busy {busy:.0%}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("links", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--idle", type=float, default=0.0, help="seconds before each message")
    parser.add_argument("--receive", help=argparse.SUPPRESS)
    parser.add_argument("--send", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.receive:
        receive(given.receive)
    elif given.send:
        send(given.send, given.idle)
    else:
        for link in given.links:
            measure(link, given.idle)
