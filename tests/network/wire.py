"""Frames from host to host, as the kernel sees them come: what a network does, by means that are not the switch's.

A sender puts the time into UDP datagrams just before it sends them; a receiver gets every frame from a packet socket,
also those with a broken header, with the kernel's own stamp. All hosts share the machine's clock.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
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
HEAD = struct.Struct("!QQ")
TIMESTAMPNS = 35
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


def sent(machines, flows: Sequence[Flow], *, last: float = 0.0) -> list[list[Arrival]]:
    """What came of each flow. `last`: the longest that a frame may be under way."""
    targets, addresses = sorted({flow.target for flow in flows}), machines.addresses
    receivers = {target: start_on(machines, target, __file__, "receive", addresses[target]) for target in targets}
    try:
        for process in receivers.values():
            process.stdout.readline()
        send(machines, flows)
        time.sleep(last + _TAIL_SECONDS)
        came = {
            target: json.loads(process.communicate(b"end\n", timeout=60)[0]) for target, process in receivers.items()
        }
    finally:
        for process in receivers.values():
            process.kill()
            process.communicate()
    return [[Arrival(*row) for row in came[flow.target].get(addresses[flow.source], [])] for flow in flows]


def send(machines, flows: Sequence[Flow]) -> None:
    """All flows at once, but not their frames, for which the processors are too few; returns when all are sent."""
    senders = [
        start_on(
            machines, flow.source, __file__, "send", machines.addresses[flow.target], str(flow.count), str(flow.every),
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


def start_on(machines, host: int, program: str, *arguments: str) -> subprocess.Popen[bytes]:
    """Starts a program of the standard library alone on a host."""
    line = machines.command(host, [sys.executable, "-I", "-S", program, *arguments])
    return subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


# What runs on hosts.


@contextlib.contextmanager
def first_of_all() -> Iterator[None]:
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
    rest = filler[: size - OVER - 3 * HEAD.size]
    if not every:
        _flood(wire, to, count, rest)
        return
    with first_of_all():
        start = (time.monotonic() // every + 2 + turn) * every
        for number in range(count):
            wait = start + number * every - time.monotonic()
            if wait > 0:
                time.sleep(wait)
            wire.sendto(HEAD.pack(number, time.time_ns()) * 3 + rest, to)


def _flood(wire: socket.socket, to: tuple[str, int], count: int, rest: bytes) -> None:
    """Many datagrams with one call, which the kernel takes apart."""
    each = 3 * HEAD.size + len(rest)
    wire.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, each)
    at_once = min(64, 60_000 // each)
    for first in range(0, count, at_once):
        at = time.time_ns()
        wire.sendto(b"".join(HEAD.pack(n, at) * 3 + rest for n in range(first, min(first + at_once, count))), to)


def _receive(address: str) -> None:
    # A datagram that nobody listens for would be answered.
    deaf = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    deaf.bind((address, PORT))
    wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ETHERTYPE_IPV4))
    wire.bind(("eth0", _ETHERTYPE_IPV4))
    wire.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCED, 512 << 20)
    wire.setsockopt(socket.SOL_SOCKET, TIMESTAMPNS, 1)
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
    return HEAD.unpack(((a & b) | (b & c) | (a & c)).to_bytes(16))


def _is_broken(packet: bytes) -> bool:
    """By the checksums of IPv4 and UDP, either of which finds one wrong bit."""
    udp = packet[20:]
    pseudo = packet[12:20] + struct.pack("!HH", socket.IPPROTO_UDP, len(udp))
    return packet[0] != 0x45 or checksum(packet[:20]) != 0xFFFF or checksum(pseudo + udp) != 0xFFFF


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def counts(arrivals: Sequence[Arrival]) -> Counter[int]:
    """How often each number came."""
    return Counter(arrival.number for arrival in arrivals)


if __name__ == "__main__":
    verb, *given = sys.argv[1:]
    if verb == "send":
        _send(given[0], int(given[1]), float(given[2]), int(given[3]), float(given[4]))
    elif verb == "receive":
        _receive(given[0])
