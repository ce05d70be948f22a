"""When work on a device began and ended: by the device's own events where it has them."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import replace
from io import FileIO
from typing import Any

import torch

from penstock.costs import Profile

BUSY = 0.1
"""A machine is busy if threads waited for a core for more than this part of the time."""


def synchronize(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)  # torch.accelerator does not know devices that are written in Python
    module.synchronize(*(() if device.type == "mps" else (device,)))


def read_wait_ns(schedstat: FileIO | None) -> int:
    """Return the nanoseconds that a thread was ready to run while others had its core. A read takes a microsecond; to
    open the file takes ten."""
    return 0 if schedstat is None else int(os.pread(schedstat.fileno(), 100, 0).split()[1])


def total_wait_ns() -> int:
    """Return the same of all threads of this process together; 0 if the system does not report it."""
    total = 0
    for thread in os.listdir("/proc/self/task") if os.path.isdir("/proc/self/task") else ():
        with suppress(OSError), closing(FileIO(f"/proc/self/task/{thread}/schedstat")) as stat:  # it may have ended
            total += read_wait_ns(stat)
    return total


def measure_undisturbed(measuring: Callable[[], Profile], device: torch.device) -> Profile:
    """Measure, and once more with one thread and a note if the machine is busy: threads that compute together wait for
    the one whose core is taken, so their times say little."""
    threads, waited, start = torch.get_num_threads(), total_wait_ns(), time.perf_counter_ns()
    profile = measuring()
    if device.type != "cpu" or threads == 1 or total_wait_ns() - waited < BUSY * (time.perf_counter_ns() - start):
        return profile
    torch.set_num_threads(1)
    try:
        profile = measuring()
    finally:
        torch.set_num_threads(threads)
    note = "threads waited for cores while units were measured: their times are one thread's"
    return replace(profile, notes=(*profile.notes, note))


class Clock:
    """Marks moments on a device, and says later how far they are apart, without the time that other processes took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._schedstat: FileIO | None = None
        with suppress(OSError):  # not all systems say how long a thread waits
            self._schedstat = FileIO("/proc/thread-self/schedstat")
            weakref.finalize(self, self._schedstat.close)

    def mark(self) -> Any:
        """Now, after the work given to the device so far."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        synchronize(self._device)
        while True:
            waited_ns, now = read_wait_ns(self._schedstat), time.perf_counter_ns()
            if read_wait_ns(self._schedstat) == waited_ns:  # nor was there a wait between the two readings
                return now - waited_ns

    def seconds(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, once the device has settled."""
        if self._device.type == "cuda":
            return float(start.elapsed_time(end)) / 1e3
        return float(end - start) / 1e9
