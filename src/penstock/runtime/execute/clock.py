"""Records when actions ran, on the clock that all processes of a machine share, without delaying anything.

A GPU lags behind the process that gives it work, so marks are queued with the work and read after the step. Waiting for
the whole device at each mark would also wait for receives that are only posted, on NCCL's own streams: two ranks that
each posted one would wait for each other.
"""

from __future__ import annotations

from time import perf_counter_ns
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Marks times in one rank's work. After `finish` they are nanoseconds of `time.perf_counter_ns`."""

    def start(self) -> None:
        """Called before the first mark of a step."""

    def mark(self) -> Any:
        """Marks the moment at which the work given so far is done, without waiting for it."""

    def finish(self) -> None:
        """Waits for all marks."""

    def nanoseconds(self, mark: Any) -> int: ...


class HostClock:
    """The clock of a rank that computes on the CPU: its work is done when the call returns."""

    def start(self) -> None:
        """Nothing to do."""

    def mark(self) -> int:
        return perf_counter_ns()

    def finish(self) -> None:
        """Nothing to do."""

    def nanoseconds(self, mark: int) -> int:
        return mark


class StreamClock:
    """The clock of a rank that computes on a CUDA device: events on its current stream, which waits only for the
    messages that actions use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: torch.cuda.Event | None = None
        self._zero_nanoseconds = 0

    def start(self) -> None:
        self._zero = self.mark()
        self._zero.synchronize()
        self._zero_nanoseconds = perf_counter_ns()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        self.mark().synchronize()

    def nanoseconds(self, mark: torch.cuda.Event) -> int:
        assert self._zero is not None
        return self._zero_nanoseconds + round(float(self._zero.elapsed_time(mark)) * 1e6)


def clock_of(device: torch.device) -> Clock:
    """The clock for a rank's work on this device."""
    return StreamClock(device) if device.type == "cuda" else HostClock()
