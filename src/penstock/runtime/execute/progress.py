"""How far a device has come in the work that its host gave it, so that the watchdog can name the action it is at.

The host runs ahead of an accelerator: by the time that one hangs in `1F2`, its host may wait for the loss, or for a
place in the device's queue. So whenever the host passes on from one position to the next, it records an event on the
stream that its work went to; the device has passed that position once the event is complete.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import torch

from penstock.distributed.failure import OUTSIDE, Behind, Position
from penstock.distributed.watchdog import Watchdog

KEPT = 1024
"""How many events there are. They are used again in turn: a host is never further ahead, since a device's queue holds
about as many entries, and an action adds several."""


def has_events(device: torch.device) -> bool:
    """Whether work on this device is queued in streams, and recorded by events."""
    if device.type in ("cpu", "meta"):
        return False
    module = torch.get_device_module(device)
    return all(hasattr(module, name) for name in ("Event", "Stream", "current_stream", "stream", "device"))


class Progress:
    """Passes a rank's positions on to its watchdog, and marks where each ended in the work of its device.

    The main thread sets `position`; the watchdog's thread calls `behind`.
    """

    def __init__(self, device: torch.device, watchdog: Watchdog) -> None:
        self._device, self._watchdog = device, watchdog
        self._module: Any = torch.get_device_module(device)
        self._events = [self._module.Event() for _ in range(KEPT)]
        self._positions = [OUTSIDE] * KEPT
        self._marked = self._passed = 0
        self._seen: Behind | None = None
        watchdog.device = self.behind

    @property
    def position(self) -> Position:
        """Where the host is."""
        return self._watchdog.position

    @position.setter
    def position(self, position: Position) -> None:
        place = self._marked % KEPT
        self._positions[place] = self._watchdog.position
        self._events[place].record(self._module.current_stream(self._device))
        self._marked += 1
        self._watchdog.position = position

    def behind(self) -> Behind | None:
        """Where the device is, if it has not passed the last mark. Never waits for it.

        If the device has failed, as all calls then say, the answer is the last one from before.
        """
        marked = self._marked
        first = max(self._passed, marked - KEPT + 1)
        if first < marked:
            try:
                with self._module.device(self._device):  # a thread's first call would make a context on device 0
                    first = bisect_left(range(marked), True, first, marked, key=self._is_ahead)
            except RuntimeError:
                return self._seen
        if self._marked - first >= KEPT:  # meanwhile the host has used this mark again
            return self._seen
        self._passed = first
        self._seen = None
        if first < marked:
            finished = self._positions[(first - 1) % KEPT].action if first else ""
            self._seen = Behind(self._positions[first % KEPT], finished)
        return self._seen

    def _is_ahead(self, mark: int) -> bool:
        """Whether the device has yet to pass a mark."""
        return not self._events[mark % KEPT].query()
