"""The switch as its own process, `python -m penstock.network.switch.serve`, whose standard input is a `Connection`.

It ends when the maker closes that. If permitted, it takes priority over all other processes, so that frames leave when
they are due even if the hosts keep every core busy.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import scipy.special  # noqa: F401  (so that a link that changes to normal jitter need not wait for it)

from penstock.network.background import AHEAD_NS, Neighbor, Stream, parse_background
from penstock.network.switch import columns, loop
from penstock.network.switch.client import Setup
from penstock.network.switch.columns import Tables
from penstock.network.switch.filling import STALL, DecisionBuffer, counters, create_tables, stalls
from penstock.network.switch.tap import count_unread, open_counters, open_tap
from penstock.network.topology import State

TURN_SECONDS = 0.02
"""How long the loop runs before it looks for messages."""
_PR_SET_TIMERSLACK = 29


class Background:
    """Keeps the arrays filled with the neighbors' next frames. Starts when made, in place of the one before."""

    def __init__(self, t: Tables, neighbors: tuple[Neighbor, ...], seed: int) -> None:
        self._t = t
        hosts = t.affects.shape[0]
        self._start_ns = time.monotonic_ns()
        self._streams = [Stream(neighbors, seed, host) for host in range(hosts)] if neighbors else []
        t.lines[hosts:, columns.NEAR_MADE] = t.lines[hosts:, columns.NEAR_USED]

    def fill(self) -> None:
        """Fill the arrays some time ahead of the clock."""
        t = self._t
        end_ns = time.monotonic_ns() + AHEAD_NS
        for host, stream in enumerate(self._streams):
            line = t.lines[t.affects.shape[0] + host]
            room = t.near.shape[1] - int(line[columns.NEAR_MADE] - line[columns.NEAR_USED])
            at_ns, sizes = stream.until(end_ns - self._start_ns, room)
            slots = np.arange(line[columns.NEAR_MADE], line[columns.NEAR_MADE] + len(at_ns)) % t.near.shape[1]
            t.near[host, slots, columns.AT_NS], t.near[host, slots, columns.SIZE] = at_ns + self._start_ns, sizes
            line[columns.NEAR_MADE] += len(at_ns)


class SwitchServer:
    """A network in operation."""

    def __init__(self, setup: Setup) -> None:
        topology = setup.state.topology
        descriptors = [open_tap(setup.interface, Path(name)) for name in setup.namespaces]
        self._counters, self._interface = [open_counters(Path(name)) for name in setup.namespaces], setup.interface
        self._epoch = 0
        self._ended_stalls: list[dict[str, Any]] = []
        """Past stalls of links that have changed since."""
        self.tables = create_tables(topology, descriptors, time.monotonic_ns())
        loop.run(self.tables, 0)  # compiles the loop, or loads it from the cache
        self.tables.state[columns.START_NS] = time.monotonic_ns()
        loop.enqueue_all_background(self.tables)
        self._background = Background(self.tables, (), topology.seed)
        self._decisions = DecisionBuffer(self.tables, topology)
        self._state = State(topology)
        self.change(setup.state)

    def change(self, state: State) -> None:
        """Make the network like this from now on. Links and traffic that stay the same are not disturbed."""
        t, before, self._state = self.tables, self._state, state
        hosts = t.affects.shape[0]
        if state.topology != before.topology:
            self._epoch += 1
            stalls_before, now_ns = stalls(t), time.monotonic_ns()
            self._decisions = DecisionBuffer(t, state.topology, self._epoch, now_ns)
            ended = stalls_before - stalls(t)
            self._ended_stalls += [dict(zip(STALL, s, strict=True)) | {"until_ns": now_ns} for s in sorted(ended)]
        t.lines[:hosts, columns.GONE] = [host in state.gone for host in range(hosts)]
        if state.background != before.background:
            neighbors = tuple(parse_background(text, hosts) for text in state.background)
            self._background = Background(t, neighbors, state.topology.seed)
            self._background.fill()

    def counters(self) -> dict[str, Any]:
        """Return the counters."""
        values = counters(self.tables)
        values["stalls"] += self._ended_stalls
        return values | {"unread": [count_unread(counters, self._interface) for counters in self._counters]}

    def forward(self) -> None:
        """Forward frames for a while."""
        t = self.tables
        loop.run(t, time.monotonic_ns() + int(TURN_SECONDS * 1e9))
        loop.enqueue_all_background(t)
        self._decisions.fill()
        self._background.fill()
        t.state[columns.LOW] = 0


def priority() -> str:
    """Give this process priority over all others, as far as permitted, and return how far that is."""
    ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        return "real-time"
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        return "nice -20"
    return "usual"


def main() -> int:
    """Serve until the maker closes the connection. Return 0 then, or 1 after answering with an error."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends when the maker closes the connection
    maker = Connection(0)
    try:
        server = SwitchServer(maker.recv())
    except EOFError:
        return 0
    except OSError as error:
        maker.send({"error": f"{error.strerror or error}"})
        return 1
    gc.collect()
    gc.freeze()  # otherwise a collection of everything imported would delay frames
    maker.send({"ready": True, "priority": priority()})
    while True:
        server.forward()
        while maker.poll():
            try:
                state = maker.recv()
            except (EOFError, ConnectionResetError):
                return 0
            if state is None:
                maker.send(server.counters())
            else:
                server.change(state)
                maker.send({})


if __name__ == "__main__":
    sys.exit(main())
