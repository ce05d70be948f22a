"""When work on a device began and ended: by the device's own events where it has them."""

from __future__ import annotations

import time
from typing import Any

import torch


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
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def seconds(self, start: Any, end: Any) -> float:
        """The seconds between two marks, once the device has settled."""
        if self._device.type == "cuda":
            return float(start.elapsed_time(end)) / 1e3
        return float(end - start) / 1e9
