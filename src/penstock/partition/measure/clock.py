"""When work on a device began and ended: by the device's own events where it has them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch


def settle(device: torch.device) -> None:
    """Waits until a device has done its work."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)  # torch.accelerator does not know devices that are written in Python
    module.synchronize(*(() if device.type == "mps" else (device,)))


def waited(thread: str = "thread-self") -> int:
    """Nanoseconds that this thread was ready to run while others had its core; 0 if the system does not say."""
    try:
        return int(Path(f"/proc/{thread}/schedstat").read_bytes().split()[1])
    except (OSError, IndexError, ValueError):
        return 0


def all_waited() -> int:
    """The same of all threads of this process together."""
    return sum(waited(f"self/task/{thread}") for thread in os.listdir("/proc/self/task")) if waited() else 0


class Clock:
    """Marks moments on a device, and says later how far they are apart, without the time that other processes took."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now, after the work given to the device so far."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        self.settle()
        while True:
            before, now = waited(), time.perf_counter_ns()
            if waited() == before:  # nor was there a wait between the two readings
                return now - before

    def settle(self) -> None:
        """Waits until the device has done its work."""
        settle(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds between two marks, once the device has settled."""
        if self._device.type == "cuda":
            return float(start.elapsed_time(end)) / 1e3
        return float(end - start) / 1e9
