"""Tensors that wait on the host, and the streams on which they travel there and back.

Memory goes back to a device's allocator in the order of the stream that computes there. So before memory is freed that
another stream reads or fills, the computing stream waits for that one. `record_stream` alone would be as safe, but it
frees memory only once the host sees that the other stream is done, and the host runs ahead of the device: all that it
prepares in the meantime would take new memory. So it is for memory that is freed without such a wait.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.saved import check_unchanged


class Lanes:
    """The streams of a device for copies, one to the host and one back, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device), self._module.Stream(device)

    def send(self, flat: Tensor, host: Tensor) -> Any:
        """Copies to the host what the work given so far computes. Returns the event of the copy's end."""
        self._out.wait_stream(self._computing())
        with self._module.stream(self._out):
            host.copy_(flat, non_blocking=True)
            return self._out.record_event()

    def fetch(self, host: Tensor, flat: Tensor, sent: Any) -> Any:
        """Copies back after `sent`, into memory that is unused after the work given so far. Returns the end's event."""
        self._back.wait_event(sent)
        self._back.wait_stream(self._computing())
        with self._module.stream(self._back):
            flat.copy_(host, non_blocking=True)
            return self._back.record_event()

    def wait(self, event: Any) -> None:
        """Lets the device's computation wait for a copy, and the host for nothing."""
        self._computing().wait_event(event)

    def abandon(self, flat: Tensor) -> None:
        """Called before memory is freed for whose filling the computation has not waited."""
        flat.record_stream(self._back)

    def _computing(self) -> Any:
        return self._module.current_stream(self._device)


@cache
def lanes_of(device: torch.device) -> Lanes | None:
    """The lanes of a device, for all stages on it; None for the host itself, where copies are made at once."""
    return None if device.type in ("cpu", "meta") else Lanes(device)


class Away:
    """A tensor on the host, and what it takes to bring it back with the same elements, strides and misalignment.

    It is on its way there until `free`. `bring` may be called ahead of `get`, so that the copy overlaps with
    computation.
    """

    __slots__ = (
        *("__weakref__", "_buffer", "_device", "_fetched", "_found", "_found_version", "_host", "_lanes", "_layout"),
        *("_sent", "_source", "_version", "_witness"),
    )

    def __init__(self, tensor: Tensor, lanes: Lanes | None) -> None:
        self._buffer: exact.Buffer | None = None
        self._found: Tensor | None = None
        self._found_version = 0
        self._fetched: Any = None
        self._layout, self._device, self._lanes = exact.Layout.of(tensor), tensor.device, lanes
        self._witness, self._version = _without_memory(tensor), tensor._version
        flat = exact.pack(tensor)
        pinned = self._device.type != "cpu"
        self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=pinned)
        self._source: Tensor | None = None
        if lanes is None:
            self._host.copy_(flat)
        else:
            self._sent = lanes.send(flat, self._host)
            self._source = flat

    def __del__(self) -> None:
        self.drop()

    def wait_until_sent(self) -> None:
        """Lets the device's computation wait for the copy to the host, and for all earlier ones."""
        if self._lanes is not None:
            self._lanes.wait(self._sent)

    def free(self) -> None:
        """Lets go of the memory from which it was copied."""
        self._source = None

    def bring(self) -> None:
        """Starts the copy back."""
        if self._buffer is not None:
            return
        self._buffer = exact.allocate(self._layout, self._device)
        if self._lanes is None:
            self._buffer.flat.copy_(self._host)
        else:
            self._fetched = self._lanes.fetch(self._host, self._buffer.flat, self._sent)

    def arrived(self) -> Tensor:
        """The tensor, on its device."""
        self.bring()
        assert self._buffer is not None
        if self._lanes is not None:
            self._lanes.wait(self._fetched)
        if self._found is None:
            self._found = exact.unpack(self._buffer)
            self._found_version = self._found._version
        return self._found

    def get(self) -> Tensor:
        """The tensor, on its device. Raises RuntimeError, as autograd does, if it was updated in place since, there or
        after it came back.
        """
        check_unchanged(self._witness, self._version, self._layout.shape)
        found = self.arrived()
        check_unchanged(found, self._found_version, self._layout.shape)
        return found

    def drop(self) -> None:
        """Lets go of the memory on the device. The tensor may be brought again."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._lanes is not None and self._found is None:
            self._lanes.abandon(buffer.flat)
        self._found = None


def _without_memory(tensor: Tensor) -> Tensor:
    """A tensor that shares the count of updates, and no memory."""
    witness = tensor.detach()
    witness.data = _empty(tensor.device)
    return witness


@cache
def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)
