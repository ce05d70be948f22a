"""TCP streams and pings from host to host, for the benchmarks: what other people's tools would measure."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "network"))

import wire


def stream(machines, pairs: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    """Bytes of TCP payload a second that came from host to host, all pairs at once."""
    receivers, senders = [], []
    try:
        for place, (_, target) in enumerate(pairs):
            receivers.append(
                wire.start_on(machines, target, __file__, "sink", machines.addresses[target], str(wire.PORT + place))
            )
            receivers[-1].stdout.readline()
        for place, (source, target) in enumerate(pairs):
            to = machines.addresses[target]
            senders.append(wire.start_on(machines, source, __file__, "pour", to, str(wire.PORT + place), str(seconds)))
        rates = [json.loads(process.communicate(timeout=seconds + 120)[0]) for process in receivers]
    finally:
        for process in (*senders, *receivers):
            process.kill()
            process.communicate()
    return rates


def ping(machines, source: int, target: int, count: int, every: float) -> list[float | None]:
    """Seconds of each round trip of an ICMP echo, None where no answer came; by `ping` where it is installed."""
    to = machines.addresses[target]
    if shutil.which("ping"):
        line = machines.command(source, ["ping", "-n", "-c", str(count), "-i", str(every), to], {"LC_ALL": "C"})
        return read_ping(subprocess.run(line, capture_output=True, text=True, check=False).stdout, count)
    answer, _ = wire.start_on(machines, source, __file__, "ping", to, str(count), str(every)).communicate(timeout=300)
    return json.loads(answer)


def read_ping(said: str, count: int) -> list[float | None]:
    """Of what iputils' ping prints."""
    trips: list[float | None] = [None] * count
    for number, milliseconds in re.findall(r"icmp_seq=(\d+) .*time=([\d.]+) ms", said):
        trips[int(number) - 1] = float(milliseconds) / 1e3
    return trips


# What runs on hosts.


def _sink(address: str, port: int) -> None:
    with socket.create_server((address, port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
    buffer, total = bytearray(1 << 20), connection.recv_into(bytearray(1 << 16))
    # The first chunk starts the clock, so the way there and TCP's greeting do not count.
    start = end = time.monotonic()
    counted = 0
    while got := connection.recv_into(buffer):
        counted += got
        end = time.monotonic()
    print(json.dumps(counted / max(end - start, 1e-9) if total else 0.0))


def _pour(address: str, port: int, seconds: float) -> None:
    connection = socket.create_connection((address, port))
    data, end = bytes(1 << 18), time.monotonic() + seconds
    while time.monotonic() < end:
        connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def _echo(data: bytes) -> bytes:
    """An ICMP echo request with a checksum."""
    head = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, 0)
    return head[:2] + struct.pack("!H", 0xFFFF - wire.checksum(head + data)) + head[4:] + data


def _ping(address: str, count: int, every: float) -> None:
    raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    raw.setsockopt(socket.SOL_SOCKET, wire.TIMESTAMPNS, 1)
    trips: list[float | None] = [None] * count
    with wire.first_of_all():
        start = time.monotonic()
        for number in range(count + 1):
            until = start + (number + 1) * every + (2.0 if number == count else 0)
            if number < count:
                raw.sendto(_echo(wire.HEAD.pack(number, time.time_ns())), (address, 0))
            while (wait := until - time.monotonic()) > 0 and any(trip is None for trip in trips):
                if not select.select([raw], [], [], wait)[0]:
                    break
                packet, about, _, _ = raw.recvmsg(2048, 64)
                if packet[20] == 0 and len(packet) == 28 + wire.HEAD.size:
                    place, at = wire.HEAD.unpack(packet[28:])
                    seconds, nanoseconds = struct.unpack("qq", about[0][2])
                    trips[place] = seconds + nanoseconds / 1e9 - at / 1e9
    print(json.dumps(trips))


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "sink":
        _sink(given[0], int(given[1]))
    elif verb == "pour":
        _pour(given[0], int(given[1]), float(given[2]))
    elif verb == "ping":
        _ping(given[0], int(given[1]), float(given[2]))
