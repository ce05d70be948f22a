"""What a forward and a backward really take of memory, kernels' own buffers included, as the allocator counts it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

import torch
from torch.profiler import record_function

from penstock.compat import cpu_allocations
from penstock.partition.measure.footprint import Footprint

BACKWARD = "penstock: backward begins"


def really_taken(
    device: torch.device, forward: Callable[[], object], backward: Callable[[], object]
) -> Footprint | None:
    """Runs both. None if the device's allocator does not say what it gives out."""
    if device.type == "cuda":
        return _on_cuda(device, forward, backward)

    def both() -> None:
        forward()
        with record_function(BACKWARD):
            backward()

    seen = cpu_allocations(both) if device.type == "cpu" else None
    if seen is None or (BACKWARD, 0) not in seen:
        return None
    held = [0, *accumulate(size for _, size in seen)]
    kept = held[seen.index((BACKWARD, 0))]
    return Footprint(kept, max(held) - kept)


def _on_cuda(device: torch.device, forward: Callable[[], object], backward: Callable[[], object]) -> Footprint:
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    forward()
    kept = torch.cuda.memory_allocated(device) - before
    backward()
    return Footprint(kept, torch.cuda.max_memory_allocated(device) - before - kept)
