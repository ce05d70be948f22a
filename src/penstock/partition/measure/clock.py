"""When work on a device began and ended: by the device's own events where it has them."""

from __future__ import annotations

import time
from typing import Any

import torch


def settle(device: torch.device) -> None:
    """Waits until a device has done its work."""
    if device.type == "cpu":
        return
    module = torch.get_device_module(device)  # torch.accelerator does not know devices that are written in Python
    module.synchronize(*(() if device.type == "mps" else (device,)))


class Clock:
    """Marks moments on a device, and says later how far they are apart."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> Any:
        """Now, after the work given to the device so far."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            return event
        self.settle()
        return time.perf_counter_ns()

    def settle(self) -> None:
        """Waits until the device has done its work."""
        settle(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds between two marks, once the device has settled."""
        if self._device.type == "cuda":
            return float(start.elapsed_time(end)) / 1e3
        return float(end - start) / 1e9
