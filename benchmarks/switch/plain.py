"""The switch's forwarding without a compiler, for comparison: `plain.py asyncio|threads|compiled [--usual]`.

Speaks the same protocol as `penstock.network.switch.serve`, but supports only rates and a delay. `--usual`: run at
normal priority.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import heapq
import itertools
import math
import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from penstock.network.switch import columns, serve
from penstock.network.switch.client import Setup
from penstock.network.switch.filling import lateness
from penstock.network.switch.tap import count_unread, open_counters, open_tap
from penstock.network.topology import State

READS_AT_ONCE = 16


class Forwarding:
    """The forwarding itself, which does not depend on what drives it."""

    def __init__(self, setup: Setup) -> None:
        topology = setup.state.topology
        self.devices = [open_tap(setup.interface, Path(name)) for name in setup.namespaces]
        self._counters, self._interface = [open_counters(Path(name)) for name in setup.namespaces], setup.interface
        hosts = range(len(self.devices))
        self._delay_ns = [round(topology.path_impairments(host, 1 - host % 2)[0].delay_seconds * 1e9) for host in hosts]
        self._ns_a_byte = [1e9 / topology.down(host).bytes_per_second for host in hosts]
        self._limit_ns = [topology.down(host).limit_bytes * ns for host, ns in enumerate(self._ns_a_byte)]
        self._free = [0.0] * len(self.devices)
        self._turns = itertools.count()
        self._start = time.monotonic()
        self._busy = time.process_time
        self._state = np.zeros(columns.STATE, dtype=np.int64)
        self.frames = self.full = self.failed = 0

    def due(self, source: int, frame: bytes) -> tuple[int, int, int, bytes] | None:
        """When a frame leaves, its turn, its host and the frame; None if it is dropped."""
        self.frames += 1
        target = frame[5] - 1
        if not 0 <= target < len(self.devices):
            return None
        at = time.monotonic_ns() + self._delay_ns[source]
        begins = max(self._free[target], at)
        if begins - at > self._limit_ns[target]:
            self.full += 1
            return None
        self._free[target] = begins + len(frame) * self._ns_a_byte[target]
        return int(self._free[target]), next(self._turns), target, frame

    def send(self, due: int, target: int, frame: bytes) -> None:
        """Sends a frame now, and records how late that is."""
        late = max(time.monotonic_ns() - due, 1)
        try:
            os.write(self.devices[target], frame)
        except OSError:
            self.failed += 1
        self._state[columns.WORST_NS] = max(self._state[columns.WORST_NS], late)
        self._state[columns.LATE + int(math.log2(late) * columns.PER_OCTAVE)] += 1

    def answer(self, state: State | None) -> dict[str, Any]:
        """The answer to a message."""
        if state is not None:
            return {}
        return {
            "seconds": time.monotonic() - self._start,
            "frames": self.frames,
            "failed_writes": self.failed,
            "no_room": 0,
            "busy_seconds": self._busy(),
            "late": lateness(self._state),
            "links": [],
            "queue_full": self.full,
            "unread": [count_unread(counters, self._interface) for counters in self._counters],
        }


class OneLoop:
    """All hosts in one asyncio loop."""

    def __init__(self, forwarding: Forwarding, maker: Connection) -> None:
        self._forwarding, self._maker = forwarding, maker
        self._loop = asyncio.new_event_loop()
        self._waiting: list[tuple[int, int, int, bytes]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def run(self) -> None:
        for source, device in enumerate(self._forwarding.devices):
            self._loop.add_reader(device, self._read, source, device)
        self._loop.add_reader(self._maker.fileno(), self._obey)
        self._loop.run_forever()

    def _obey(self) -> None:
        try:
            self._maker.send(self._forwarding.answer(self._maker.recv()))
        except EOFError:
            self._loop.stop()

    def _read(self, source: int, device: int) -> None:
        for _ in range(READS_AT_ONCE):
            try:
                frame = os.read(device, 65536)
            except BlockingIOError:
                break
            entry = self._forwarding.due(source, frame)
            if entry is not None:
                heapq.heappush(self._waiting, entry)
        self._set_timer()

    def _leave(self) -> None:
        self._timer = None
        while self._waiting and self._waiting[0][0] <= time.monotonic_ns():
            due, _, target, frame = heapq.heappop(self._waiting)
            self._forwarding.send(due, target, frame)
        self._set_timer()

    def _set_timer(self) -> None:
        if not self._waiting or (self._timer is not None and self._timer_ns <= self._waiting[0][0]):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer_ns = self._waiting[0][0]
        self._timer = self._loop.call_at(self._timer_ns / 1e9, self._leave)  # the loop's clock is monotonic


class Threads:
    """Two threads per host: one for what it sends, one for what it receives."""

    def __init__(self, forwarding: Forwarding, maker: Connection) -> None:
        self._forwarding, self._maker = forwarding, maker
        self._waiting: list[list[tuple[int, int, int, bytes]]] = [[] for _ in forwarding.devices]
        self._news = [threading.Condition() for _ in forwarding.devices]

    def run(self) -> None:
        for host, device in enumerate(self._forwarding.devices):
            os.set_blocking(device, True)
            threading.Thread(target=self._read, args=(host, device), daemon=True).start()
            threading.Thread(target=self._leave, args=(host,), daemon=True).start()
        with contextlib.suppress(EOFError):
            while True:
                self._maker.send(self._forwarding.answer(self._maker.recv()))
        os._exit(0)

    def _read(self, source: int, device: int) -> None:
        while True:
            entry = self._forwarding.due(source, os.read(device, 65536))
            if entry is not None:
                with self._news[entry[2]]:
                    heapq.heappush(self._waiting[entry[2]], entry)
                    self._news[entry[2]].notify()

    def _leave(self, host: int) -> None:
        waiting, news = self._waiting[host], self._news[host]
        while True:
            with news:
                while not waiting or waiting[0][0] > time.monotonic_ns():
                    news.wait((waiting[0][0] - time.monotonic_ns()) / 1e9 if waiting else None)
                due, _, target, frame = heapq.heappop(waiting)
            self._forwarding.send(due, target, frame)


def main(kind: str, usual: bool) -> int:
    if usual:
        serve.priority = lambda: "usual"
    if kind == "compiled":
        return serve.main()
    maker = Connection(0)
    forwarding = Forwarding(maker.recv())
    maker.send({"ready": True, "priority": serve.priority()})
    (OneLoop if kind == "asyncio" else Threads)(forwarding, maker).run()
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=("asyncio", "threads", "compiled"))
    parser.add_argument("--usual", action="store_true")
    given = parser.parse_args()
    sys.exit(main(given.kind, given.usual))
