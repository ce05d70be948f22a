"""When this machine stood still: a host may take processors away from it, for up to a tenth of a second at a time.

A real-time process on each processor asks to be woken every millisecond and notes when it was woken late. No emulation
is on time then.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import time
from bisect import bisect_right
from collections.abc import Sequence

EVERY_SECONDS = 1e-3
LATE_SECONDS = 0.5e-3
"""A wake-up this late is a standstill."""
AFTER_SECONDS, AFTER_SHARE = 2e-3, 0.1
"""Afterwards, the backlog keeps the processors busy: for this long, plus this share of the standstill."""


class Standstills:
    """Those of all processors that we may use, while the `with` block runs; in seconds of the wall clock."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def __enter__(self) -> Standstills:
        self._watching = [
            subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(one)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for one in sorted(os.sched_getaffinity(0))
        ]
        for process in self._watching:
            assert process.stdout is not None
            process.stdout.readline()
        return self

    def __exit__(self, *error: object) -> None:
        try:
            spans = [span for one in self._watching for span in json.loads(one.communicate(b"end\n", timeout=60)[0])]
        finally:
            for process in self._watching:
                process.kill()
                process.communicate()
        self._spans = _joined(spans)
        self._begins = [begin for begin, _ in self._spans]

    def met(self, begin: float, end: float, least: float = 0.0) -> bool:
        """Whether a standstill (with its backlog) of `least` seconds or longer overlaps this time."""
        place = bisect_right(self._begins, end)
        while place and self._spans[place - 1][1] > begin:
            place -= 1
            if self._spans[place][1] - self._spans[place][0] >= least:
                return True
        return False


def _joined(spans: Sequence[Sequence[float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            begin, end = joined[-1][0], max(joined.pop()[1], end)
        joined.append((begin, end))
    return joined


def _asked_to_end() -> bool:
    try:
        return bool(os.read(0, 8))
    except BlockingIOError:
        return False


def _watch(processor: int) -> None:
    os.sched_setaffinity(0, {processor})
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    ctypes.CDLL(None).prctl(29, 1, 0, 0, 0)  # timer slack
    os.set_blocking(0, False)
    print("ready", flush=True)
    spans, due = [], time.time() + EVERY_SECONDS
    while not _asked_to_end():
        time.sleep(max(due - time.time(), 0))
        now = time.time()
        if now > due + LATE_SECONDS:
            spans.append((due, now + AFTER_SECONDS + AFTER_SHARE * (now - due)))
        due = now + EVERY_SECONDS
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    print(json.dumps(spans))


if __name__ == "__main__":
    _watch(int(sys.argv[1]))
