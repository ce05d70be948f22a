"""Offloads activations: what a forward saves for backward goes to the host's memory, and comes back in time.

Parameters and buffers stay where they are. On a GPU the copies overlap with computation, on their own stream (this path
has not run on any GPU yet). If the device is the host itself, the copies are still made, but save nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import ArgumentError
from penstock.runtime.exact import rules as exact
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start
from penstock.runtime.gradients.distribution import local


class Away:
    """A tensor on the host, and what it takes to bring it back with the same elements, strides and misalignment.

    `bring` may be called ahead of `get`, so that the copy overlaps with other computation.
    """

    __slots__ = ("__weakref__", "_buffer", "_copy_stream", "_device", "_event", "_host", "_layout")

    def __init__(self, tensor: Tensor, copy_stream: torch.cuda.Stream | None) -> None:
        self._layout = exact.Layout.of(tensor)
        self._device = tensor.device
        self._copy_stream = copy_stream
        self._buffer: exact.Buffer | None = None
        self._event: torch.cuda.Event | None = None
        flat = exact.pack(tensor)
        self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=copy_stream is not None)
        if copy_stream is None:
            self._host.copy_(flat)
            return
        copy_stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(copy_stream):
            self._host.copy_(flat, non_blocking=True)
        flat.record_stream(copy_stream)  # its memory is not reused before the copy is made

    def bring(self) -> None:
        """Starts the copy back."""
        if self._buffer is not None:
            return
        self._buffer = exact.allocate(self._layout, self._device)
        if self._copy_stream is None:
            self._buffer.flat.copy_(self._host)
            return
        self._copy_stream.wait_stream(torch.cuda.current_stream(self._device))  # this memory is free from here on
        with torch.cuda.stream(self._copy_stream):
            self._buffer.flat.copy_(self._host, non_blocking=True)
            self._event = self._copy_stream.record_event()

    def get(self) -> Tensor:
        """The tensor, on its device."""
        self.bring()
        assert self._buffer is not None
        if self._event is not None:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return exact.unpack(self._buffer)


class Offload(Feature):
    """The saved tensors of one stage.

    Args:
        held: returns the parameters and buffers that live on the stage now and stay there.
    """

    @classmethod
    def of(cls, stage: StageContext) -> Offload | None:
        """If `offload=` asks for it. Raises ArgumentError if something in the stage excludes it."""
        if not stage.training or not stage.offload:
            return None
        if any(isinstance(part, nn.RReLU) and part.training for part in stage.recorded.module.modules()):
            raise ArgumentError(
                "offload: torch saves the noise of nn.RReLU for backward before it has drawn that noise, so other "
                f"numbers would come back; choose offload={{{stage.index}: False}}, or use another activation"
            )
        return cls(stage.device, stage.held)

    def __init__(self, device: torch.device, held: Callable[[], Iterable[Tensor]]) -> None:
        self._held = held
        self._copy_stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._stays: set[int] = set()
        self._away: dict[int, list[weakref.ref[Away]]] = {}
        self._microbatch = -1

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        self._away.clear()

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward: sends what it saves to the host, unless its graph is dropped."""
        if runs_again:
            yield
            return
        held = (part for tensor in self._held() if (part := local(tensor)).layout is torch.strided)
        self._stays = {part.untyped_storage().data_ptr() for part in held}  # they may have new memory
        self._microbatch = microbatch
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def backward(self, microbatch: int) -> AbstractContextManager[None]:
        """Called before a backward: starts to fetch all that its forward saved, in the order of need."""
        for ref in reversed(self._away.pop(microbatch, ())):
            away = ref()
            if away is not None:
                away.bring()
        return nullcontext()

    def away(self, tensor: Tensor, microbatch: int) -> Away:
        """Sends a tensor to the host until the backward of a microbatch."""
        with torch.no_grad():
            away = Away(tensor, self._copy_stream)
        self._away.setdefault(microbatch, []).append(weakref.ref(away))
        return away

    def _pack(self, tensor: Tensor) -> Tensor | Away:
        if not can_go(tensor) or tensor.untyped_storage().data_ptr() in self._stays:
            return tensor
        return self.away(tensor, self._microbatch)


def _unpack(saved: Any) -> Tensor:
    if isinstance(saved, Away):
        with torch.no_grad():
            return saved.get()
    assert isinstance(saved, Tensor)
    return saved


def can_go(tensor: Tensor) -> bool:
    """Whether a tensor can go to the host. Plain ones can; foreign subclasses, sparse and quantized ones stay."""
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not (tensor.is_conj() or tensor.is_neg()) and tensor.numel() > 0
