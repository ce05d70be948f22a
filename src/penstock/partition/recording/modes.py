"""Calls that stages add to the recorded ones, to enter and leave the modes in which a recorded call ran."""

from __future__ import annotations

import torch

from penstock._base.compat import autocast_state
from penstock.partition.recording.facts import Modes


def enter_autocast(device: torch.device, dtype: torch.dtype, enabled: bool, caches: bool = True) -> torch.autocast:
    """Turns autocast on or off for the device's type. Pass the result to `leave_autocast`."""
    context = torch.autocast(device.type, dtype=dtype, enabled=enabled, cache_enabled=caches)
    context.__enter__()  # type: ignore[no-untyped-call]
    return context


def leave_autocast(context: torch.autocast) -> None:
    context.__exit__(None, None, None)


class EntryModes:
    """The modes at the forward's entry, with which each call's are compared."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.grad_enabled = torch.is_grad_enabled()
        self.autocast = autocast_state(device)

    def difference(self) -> Modes:
        """The present modes, if they differ from those at entry."""
        grad = torch.is_grad_enabled()
        autocast = autocast_state(self.device)
        enabled_differs = autocast[0] != self.autocast[0] or (autocast[0] and autocast != self.autocast)
        return Modes(grad if grad != self.grad_enabled else None, autocast if enabled_differs else None)
