"""Frames from host to host, as the kernel sees them come: what a network does, by means that are not the switch's.

A sender puts the time into UDP datagrams just before it sends them; a receiver gets every frame from a packet socket,
also those with a broken header, with the kernel's own stamp. All hosts share the machine's clock. Where `ping` is
installed, the benchmark uses it as well.
"""

from __future__ import annotations

import contextlib
import ctypes
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
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PORT = 4791
OVER = 42
"""Bytes of a datagram's frame beside its payload: Ethernet, IPv4 and UDP headers."""
_HEAD = struct.Struct("!QQ")
_TIMESTAMPNS = 35
_RECEIVE_BUFFER_FORCED = 33
_UDP_SEGMENT = 103
_SOL_PACKET, _PACKET_STATISTICS = 263, 6
_ETHERTYPE_IPV4 = 0x0800
_TAIL_SECONDS = 0.3
"""How long a receiver goes on after the last frame was due."""


@dataclass(frozen=True)
class Flow:
    """Datagrams from one host to another.

    Attributes:
        every: seconds from one to the next; 0: as fast as the socket takes them.
        size: bytes of the frame.
    """

    source: int
    target: int
    count: int
    every: float
    size: int = 200


@dataclass(frozen=True)
class Arrival:
    """A frame that came, times in seconds of one clock."""

    number: int
    sent: float
    came: float
    broken: bool

    @property
    def took(self) -> float:
        return self.came - self.sent


class Receivers:
    """On each host that flows lead to, from `with` on; `end` returns what came, flow by flow."""

    def __init__(self, machines, flows: Sequence[Flow]) -> None:
        self._flows = flows
        self._addresses = machines.addresses
        self._running = {
            target: _on(machines, target, "receive", machines.addresses[target])
            for target in sorted({flow.target for flow in flows})
        }

    def __enter__(self) -> Receivers:
        for process in self._running.values():
            process.stdout.readline()
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            process.kill()
            process.communicate()

    def end(self) -> list[list[Arrival]]:
        """After the last frame has come."""
        came = {}
        for target, process in self._running.items():
            came[target] = json.loads(process.communicate(b"end\n", timeout=60)[0])
        return [
            [Arrival(*row) for row in came[flow.target].get(self._addresses[flow.source], [])] for flow in self._flows
        ]


def sent(machines, flows: Sequence[Flow], *, last: float = 0.0) -> list[list[Arrival]]:
    """What came of each flow. `last`: the longest that a frame may be under way."""
    with Receivers(machines, flows) as receivers:
        send(machines, flows)
        time.sleep(last + _TAIL_SECONDS)
        return receivers.end()


def send(machines, flows: Sequence[Flow]) -> None:
    """All flows at once, but not their frames, for which the processors are too few; returns when all are sent."""
    senders = [
        _on(
            machines, flow.source, "send", machines.addresses[flow.target], str(flow.count), str(flow.every),
            str(flow.size), str(place / len(flows)),
        )
        for place, flow in enumerate(flows)
    ]  # fmt: skip
    try:
        for process in senders:
            process.stdout.readline()
        for process in senders:  # none begins before all are there
            process.stdin.write(b"go\n")
            process.stdin.flush()
        for process in senders:
            process.communicate(timeout=300)
            assert process.returncode == 0
    finally:
        for process in senders:
            process.kill()
            process.communicate()


def stream(machines, pairs: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    """Bytes of TCP payload a second that came from host to host, all pairs at once."""
    receivers, senders = [], []
    try:
        for place, (_, target) in enumerate(pairs):
            receivers.append(_on(machines, target, "sink", machines.addresses[target], str(PORT + place)))
            receivers[-1].stdout.readline()
        for place, (source, target) in enumerate(pairs):
            to = machines.addresses[target]
            senders.append(_on(machines, source, "pour", to, str(PORT + place), str(seconds)))
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
    answer, _ = _on(machines, source, "ping", to, str(count), str(every)).communicate(timeout=300)
    return json.loads(answer)


def read_ping(said: str, count: int) -> list[float | None]:
    """Of what iputils' ping prints."""
    trips: list[float | None] = [None] * count
    for number, milliseconds in re.findall(r"icmp_seq=(\d+) .*time=([\d.]+) ms", said):
        trips[int(number) - 1] = float(milliseconds) / 1e3
    return trips


def _on(machines, host: int, *arguments: str) -> subprocess.Popen[bytes]:
    line = machines.command(host, [sys.executable, "-I", "-S", __file__, *arguments])
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# What runs on hosts.


@contextlib.contextmanager
def _first() -> Iterator[None]:
    """Before all others, the switch included: what is measured is the network, not who waits for a core.

    But not for the end of the interpreter, which would keep the switch waiting for some 10 ms.
    """
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # timer slack
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(2))
    yield
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _send(address: str, count: int, every: float, size: int, turn: float) -> None:
    to = (address, PORT)
    wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    filler = bytes(range(256)) * (size // 256 + 1)
    print("ready", flush=True)
    sys.stdin.readline()
    rest = filler[: size - OVER - 3 * _HEAD.size]
    if not every:
        _flood(wire, to, count, rest)
        return
    with _first():
        start = (time.monotonic() // every + 2 + turn) * every
        for number in range(count):
            wait = start + number * every - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            wire.sendto(_HEAD.pack(number, time.time_ns()) * 3 + rest, to)


def _flood(wire: socket.socket, to: tuple[str, int], count: int, rest: bytes) -> None:
    """Many datagrams with one call, which the kernel takes apart."""
    each = 3 * _HEAD.size + len(rest)
    wire.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, each)
    at_once = min(64, 60_000 // each)
    for first in range(0, count, at_once):
        at = time.time_ns()
        wire.sendto(b"".join(_HEAD.pack(n, at) * 3 + rest for n in range(first, min(first + at_once, count))), to)


def _receive(address: str) -> None:
    # A datagram that nobody listens for would be answered.
    deaf = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    deaf.bind((address, PORT))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETHERTYPE_IPV4))
    wire.bind(("eth0", _ETHERTYPE_IPV4))
    wire.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCED, 512 << 20)
    wire.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
    wire.setblocking(False)
    print("ready", flush=True)
    sys.stdin.readline()  # until then the kernel keeps all that comes, and nobody needs a processor for it
    frames: list[tuple[int, bytes]] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            frame, about, _, _ = wire.recvmsg(70_000, 64)
            seconds, nanoseconds = struct.unpack("qq", about[0][2])
            frames.append((seconds * 10**9 + nanoseconds, frame))
    _, dropped = struct.unpack("II", wire.getsockopt(_SOL_PACKET, _PACKET_STATISTICS, 8))
    assert not dropped, f"{dropped} frames did not fit into the receiver's buffer"
    # Which sender a frame is from is told by its Ethernet header, which the switch leaves alone.
    found: dict[str, list[tuple[int, float, float, bool]]] = {}
    for came, frame in frames:
        number, at = _majority(frame[OVER : OVER + 48])
        source = socket.inet_ntoa(frame[8:12])
        found.setdefault(source, []).append((number, at / 1e9, came / 1e9, _is_broken(frame[14:])))
    print(json.dumps(found))


def _majority(three: bytes) -> tuple[int, int]:
    a, b, c = (int.from_bytes(three[place : place + 16]) for place in (0, 16, 32))
    return _HEAD.unpack(((a & b) | (b & c) | (a & c)).to_bytes(16))


def _is_broken(packet: bytes) -> bool:
    """By the checksums of IPv4 and UDP, either of which finds one wrong bit."""
    udp = packet[20:]
    pseudo = packet[12:20] + struct.pack("!HH", socket.IPPROTO_UDP, len(udp))
    return packet[0] != 0x45 or _sum(packet[:20]) != 0xFFFF or _sum(pseudo + udp) != 0xFFFF


def _sum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


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
    return head[:2] + struct.pack("!H", 0xFFFF - _sum(head + data)) + head[4:] + data


def _ping(address: str, count: int, every: float) -> None:
    wire = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
    wire.setsockopt(socket.SOL_SOCKET, _TIMESTAMPNS, 1)
    trips: list[float | None] = [None] * count
    with _first():
        start = time.monotonic()
        for number in range(count + 1):
            until = start + (number + 1) * every + (2.0 if number == count else 0)
            if number < count:
                wire.sendto(_echo(_HEAD.pack(number, time.time_ns())), (address, 0))
            while (wait := until - time.monotonic()) > 0 and any(trip is None for trip in trips):
                if not select.select([wire], [], [], wait)[0]:
                    break
                packet, about, _, _ = wire.recvmsg(2048, 64)
                if packet[20] == 0 and len(packet) == 28 + _HEAD.size:
                    place, at = _HEAD.unpack(packet[28:])
                    seconds, nanoseconds = struct.unpack("qq", about[0][2])
                    trips[place] = seconds + nanoseconds / 1e9 - at / 1e9
    print(json.dumps(trips))


def counts(arrivals: Sequence[Arrival]) -> Counter[int]:
    """How often each number came."""
    return Counter(arrival.number for arrival in arrivals)


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "send":
        _send(given[0], int(given[1]), float(given[2]), int(given[3]), float(given[4]))
    elif verb == "receive":
        _receive(given[0])
    elif verb == "sink":
        _sink(given[0], int(given[1]))
    elif verb == "pour":
        _pour(given[0], int(given[1]), float(given[2]))
    elif verb == "ping":
        _ping(given[0], int(given[1]), float(given[2]))
