"""What devices have allocated after each action of a step that is timed.

The host makes and frees tensors in the order in which the device will use them, so the allocator's own count at the end
of an action is what that action leaves, however far the device is behind. Asking takes tens of microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from penstock.runtime.execute.program import BoundAction


def counter(device: torch.device) -> Callable[[], int] | None:
    """What tells how many bytes are allocated on a device now; None if nothing does, as on the CPU."""
    if device.type in ("cpu", "meta"):
        return None
    count: Callable[[torch.device], int] | None = getattr(torch.get_device_module(device), "memory_allocated", None)
    return None if count is None else lambda: int(count(device))


def noting_allocated(
    actions: Sequence[BoundAction], devices: Mapping[int, torch.device]
) -> tuple[Sequence[BoundAction], dict[int, list[int]]]:
    """The same actions, and by rank a list to which each adds what its device then has allocated.

    Args:
        devices: by rank. Ranks whose device does not tell have no list.
    """
    counters = {rank: count for rank, device in devices.items() if (count := counter(device)) is not None}
    noted: dict[int, list[int]] = {rank: [] for rank in counters}
    if not counters:
        return actions, noted

    def noting(each: BoundAction) -> BoundAction:
        if each.rank not in counters:
            return each
        work, count, note = each.work, counters[each.rank], noted[each.rank].append

        def and_notes(*ready: Any) -> None:
            work(*ready)
            note(count())

        return replace(each, work=and_notes)

    return [noting(each) for each in actions], noted
