"""Keep the arrays filled with the neighbours' next frames."""

from __future__ import annotations

import time

import numpy as np

from penstock.network.background import AHEAD_NS, Neighbour, Stream
from penstock.network.switch import columns
from penstock.network.switch.columns import Tables


class Background:
    """Starts when it is created, and replaces the previous background."""

    def __init__(self, t: Tables, neighbours: tuple[Neighbour, ...], seed: int) -> None:
        self._t = t
        hosts = t.meets.shape[0]
        self._start_ns = time.monotonic_ns()
        self._streams = [Stream(neighbours, seed, host) for host in range(hosts)] if neighbours else []
        t.lines[hosts:, columns.NEAR_MADE] = t.lines[hosts:, columns.NEAR_USED]

    def fill(self) -> None:
        """Fills the arrays some time ahead of the clock."""
        t = self._t
        end_ns = time.monotonic_ns() + AHEAD_NS
        for host, stream in enumerate(self._streams):
            line = t.lines[t.meets.shape[0] + host]
            room = t.near.shape[1] - int(line[columns.NEAR_MADE] - line[columns.NEAR_USED])
            at_ns, sizes = stream.until(end_ns - self._start_ns, room)
            places = np.arange(line[columns.NEAR_MADE], line[columns.NEAR_MADE] + len(at_ns)) % t.near.shape[1]
            t.near[host, places, columns.AT_NS], t.near[host, places, columns.SIZE] = at_ns + self._start_ns, sizes
            line[columns.NEAR_MADE] += len(at_ns)
