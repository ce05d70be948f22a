"""The progress bar of penstock fabric: the trial, the layer being sent, and its p99 so far."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from rich.console import Console

from penstock.fabric.statistics import fewest
from penstock.fabric.views.text import live

_SHOWN_SECONDS = 0.25


class Follower:
    """Follows a run: it is told when a trial ends, and from time to time in between."""

    def __init__(
        self, names: Sequence[str], tell: Callable[[int, str, float | None], None], iterations: int = 1
    ) -> None:
        self._names = names
        self._tell = tell
        self._iterations = iterations
        self._seconds: list[list[float]] = [[] for _ in names]
        self._done = 0
        self._ended_at = self._shown_at = 0.0

    def trial(self, number: int, longest_ns: Sequence[int]) -> None:
        """Notes that trial `number` has ended. `longest_ns`: each transfer's longest duration."""
        for seconds, duration_ns in zip(self._seconds, longest_ns, strict=True):
            if duration_ns > 0:
                seconds.append(duration_ns / 1e9 / self._iterations)
        self._done, self._ended_at = number + 1, time.monotonic()
        self.tick()

    def tick(self) -> None:
        """Shows how far the trial should be by now, if transfers take as long as usual."""
        now = time.monotonic()
        if not self._done or now - self._shown_at < _SHOWN_SECONDS:
            return
        self._shown_at = now
        place, left = 0, now - self._ended_at
        while place < len(self._seconds) - 1:
            usual = self._quantile(place, 0.5)
            if usual is None or left < usual * self._iterations:
                break
            left -= usual * self._iterations
            place += 1
        self._tell(self._done, self._names[place], self._quantile(place, 0.99))

    def _quantile(self, place: int, q: float) -> float | None:
        """Of a transfer's times so far; None while there are too few to bound it."""
        times = self._seconds[place]
        return float(np.quantile(times, q)) if len(times) >= fewest(q) else None


@contextmanager
def follower(names: Sequence[str], trials: int, *, quiet: bool, iterations: int = 1) -> Iterator[Follower | None]:
    """Shows a progress bar on stderr. Yields None if that is not a terminal, or if `quiet`."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with live(trials, Console(stderr=True)) as tell:
        yield Follower(names, tell, iterations)
