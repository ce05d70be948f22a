"""Offloads activations: what a forward saves for backward goes to the host's memory, and comes back in time.

What a microbatch saves is sent while its forward runs. The memory is free once the rank's next computation has ended,
and everything is fetched from the beginning of the computation before the one that needs it: I needs what autograd
saves, W what it keeps itself. On an accelerator the copies run beside the computation, each way on a stream of its own
(`CopyStreams`). On the CPU they are made too, and save nothing.

Parameters and buffers stay where they are, and so does what would come back too soon (`schedule/activations.py`).

Memory goes back to a device's allocator in the order of the stream that computes there. So before memory is freed that
another stream reads or fills, the computing stream waits for that one. `record_stream` alone would be as safe, but it
frees memory only once the host sees that the other stream is done, and the host runs ahead of the device: all that it
prepares in the meantime would take new memory. So it is for memory that is freed without such a wait.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock._base.compat import WeakStorage, is_accelerator, storage_id
from penstock._base.errors import ArgumentError
from penstock._base.formatting import name_stages
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Saved, SavedTensor, check_unchanged
from penstock.runtime.features.feature import Feature, StageContext, Start
from penstock.runtime.gradients.dtensors import local
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.activations import NEAR, OffloadTrips, offload_trips


class CopyStreams:
    """The streams of a device for copies, one to the host and one back, beside the one that computes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module = torch.get_device_module(device)
        self._out, self._back = self._module.Stream(device), self._module.Stream(device)

    def send(self, flat: Tensor, host: Tensor) -> Any:
        """Copy to the host what the work given so far computes. Return the event of the copy's end."""
        self._out.wait_stream(self._computing())
        with self._module.stream(self._out):
            host.copy_(flat, non_blocking=True)
            return self._out.record_event()

    def fetch(self, host: Tensor, flat: Tensor, sent: Any) -> Any:
        """Copy back after `sent`, into memory that is unused after the work given so far. Return the end's event."""
        self._back.wait_event(sent)
        self._back.wait_stream(self._computing())
        with self._module.stream(self._back):
            flat.copy_(host, non_blocking=True)
            return self._back.record_event()

    def wait(self, event: Any) -> None:
        """Let the device's computation wait for a copy, and the host for nothing."""
        self._computing().wait_event(event)

    def abandon(self, flat: Tensor) -> None:
        """Called before memory is freed for whose filling the computation has not waited."""
        flat.record_stream(self._back)

    def _computing(self) -> Any:
        return self._module.current_stream(self._device)


@cache
def copy_streams_for(device: torch.device) -> CopyStreams | None:
    """Return the copy streams of a device, for all stages on it; None for the host, which copies at once."""
    return CopyStreams(device) if is_accelerator(device) else None


class HostCopy:
    """A tensor on the host, and what it takes to bring it back with the same elements, strides and misalignment.

    It is on its way there until `release_source`. `start_fetch` may be called ahead of `get`, so that the copy overlaps
    with computation.
    """

    __slots__ = (
        "__weakref__", "_buffer", "_device", "_fetched", "_host", "_layout", "_sent", "_source", "_streams", "_tensor",
        "_tensor_version", "_version", "_witness",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, streams: CopyStreams | None) -> None:
        self._buffer: exact.Buffer | None = None
        self._tensor: Tensor | None = None
        self._tensor_version = 0
        self._fetched: Any = None
        self._layout, self._device, self._streams = exact.Layout.of(tensor), tensor.device, streams
        self._witness, self._version = _without_memory(tensor), tensor._version
        flat = exact.pack(tensor)
        pinned = self._device.type != "cpu"
        self._host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=pinned)
        self._source: Tensor | None = None
        if streams is None:
            self._host.copy_(flat)
        else:
            self._sent = streams.send(flat, self._host)
            self._source = flat

    def __del__(self) -> None:
        self.release_fetched()

    def wait_until_sent(self) -> None:
        """Let the device's computation wait for the copy to the host, and for all earlier ones."""
        if self._streams is not None:
            self._streams.wait(self._sent)

    def release_source(self) -> None:
        """Let go of the memory from which it was copied."""
        self._source = None

    def start_fetch(self) -> None:
        """Start the copy back."""
        if self._buffer is not None:
            return
        self._buffer = exact.allocate(self._layout, self._device)
        if self._streams is None:
            self._buffer.flat.copy_(self._host)
        else:
            self._fetched = self._streams.fetch(self._host, self._buffer.flat, self._sent)

    def wait_until_fetched(self) -> Tensor:
        """Return the tensor, on its device."""
        self.start_fetch()
        assert self._buffer is not None
        if self._streams is not None:
            self._streams.wait(self._fetched)
        if self._tensor is None:
            self._tensor = exact.unpack(self._buffer)
            self._tensor_version = self._tensor._version
        return self._tensor

    def get(self) -> Tensor:
        """Return the tensor, on its device. Raise RuntimeError, as autograd does, if it was updated in place since,
        there or after it came back."""
        check_unchanged(self._witness, self._version, self._layout.shape)
        tensor = self.wait_until_fetched()
        check_unchanged(tensor, self._tensor_version, self._layout.shape)
        return tensor

    def release_fetched(self) -> None:
        """Let go of the memory on the device. The tensor may be brought again."""
        buffer, self._buffer = self._buffer, None
        if buffer is not None and self._streams is not None and self._tensor is None:
            self._streams.abandon(buffer.flat)
        self._tensor = None


def _without_memory(tensor: Tensor) -> Tensor:
    """Return a tensor that shares the count of updates, and no memory."""
    witness = tensor.detach()
    witness.data = _empty(tensor.device)
    return witness


@cache
def _empty(device: torch.device) -> Tensor:
    return torch.empty(0, device=device)


_Refs = list[weakref.ref[HostCopy]]


class Offload(Feature):
    """The saved tensors of one stage, and what W needs of its forwards: a `Keeper`.

    Args:
        resident: returns the parameters and buffers that live on the stage now and stay there.
        compiled: whether anything in the stage is compiled.

    Attributes:
        pack: takes what autograd saves in a forward. The compiler must not look into it where it runs what it leaves
            uncompiled: it fails on parameters with gradients of another dtype.
    """

    @classmethod
    def of(cls, stage: StageContext) -> Offload | None:
        """Build the feature if `offload=` asks for it. Raise ArgumentError if something in the stage excludes it:
        `nn.RReLU`, an activation that mmcv builds by name."""
        if not stage.training or not stage.offload:
            return None
        if any(isinstance(part, nn.RReLU) and part.training for part in stage.modules()):
            raise ArgumentError(
                "offload: torch saves the noise of nn.RReLU for backward before it has drawn that noise, so other "
                f"numbers would come back; choose offload={{{stage.index}: False}}, or use another activation"
            )
        trips = offload_trips(stage.row, stage.index)
        return cls(stage.index, stage.device, stage.held, trips, compiled=stage.is_compiled)

    def __init__(
        self,
        stage: int,
        device: torch.device,
        resident: Callable[[], Iterable[Tensor]],
        offload_trips: OffloadTrips,
        *,
        compiled: bool = False,
    ) -> None:
        self._stage = stage
        self._resident = resident
        self._trips = offload_trips
        empty = torch.empty(0, device=device)
        self._device, self._kind = empty.device, type(empty)
        self._streams = copy_streams_for(self._device)
        self._resident_storages: set[int] = set()
        self._sent_copies: dict[tuple[Any, ...], tuple[WeakStorage, weakref.ref[HostCopy]]] = {}
        self._leaving: dict[int, list[HostCopy]] = {}
        self._for_backward: dict[int, _Refs] = {}
        self._for_weights: dict[int, _Refs] = {}
        self._microbatch: int | None = None  # whose forward is running
        self.pack: Callable[[Tensor], Saved] = self._pack
        if compiled:
            self.pack = torch.compiler.disable(self._pack)  # type: ignore[no-untyped-call]

    def begin_step(self, start: Start) -> None:
        """Drop anything left by a step that raised."""
        for microbatch in list(self._leaving):
            self._free(microbatch)
        self._for_backward.clear()
        self._for_weights.clear()
        self._microbatch = None

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wrap a forward: send what it saves to the host, unless its graph is dropped."""
        if runs_again or microbatch not in self._trips.any:
            yield
            return
        strided = (part for tensor in self._resident() if (part := local(tensor)).layout is torch.strided)
        self._resident_storages = {storage_id(part) for part in strided}  # they may have new memory
        self._microbatch = microbatch
        try:
            with saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._microbatch = None
            self._sent_copies.clear()

    def past(self, action: Action) -> None:
        """Free what a forward sent, once the computation after one of these has ended."""
        if action.op is Op.F:
            assert action.microbatch is not None
            self._free(action.microbatch)

    def upcoming(self, action: Action) -> None:
        """Called before the computation before one of these begins: fetches what a backward needs."""
        assert action.microbatch is not None
        if action.op is not Op.F:
            refs = self._for_weights if action.op is Op.W else self._for_backward
            _start_fetching(refs.get(action.microbatch, ()))

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Wrap a backward. What it shares with a W that comes much later is fetched once more for that."""
        self._for_backward.pop(microbatch, None)
        yield
        if microbatch in self._trips.twice:
            for host_copy in _alive(self._for_weights.get(microbatch, ())):
                host_copy.release_fetched()

    @contextmanager
    def weights(self, microbatch: int) -> Iterator[None]:
        """Wrap a W."""
        self._for_weights.pop(microbatch, None)
        yield

    def _pack(self, tensor: Tensor) -> Saved:
        if self._microbatch not in self._trips.for_backward or self._must_stay(tensor):
            return SavedTensor(tensor, tensor._version)
        return self._send_once(tensor, self._microbatch, self._for_backward)

    def save(self, tensor: Tensor) -> Saved:
        """Take what W needs of a forward, or of one that runs again just before it."""
        if self._microbatch not in self._trips.for_weights or self._must_stay(tensor):
            return SavedTensor.of(tensor)
        return self._send_once(tensor, self._microbatch, self._for_weights)

    def save_argument(self, tensor: Tensor, microbatch: int) -> HostCopy | None:
        """Send a tensor to the host until the backward of a microbatch, if it can go and is away for long enough."""
        goes = microbatch in self._trips.for_backward and self._can_offload(tensor)
        return self._send(tensor, microbatch, self._for_backward) if goes else None

    def _send_once(self, tensor: Tensor, microbatch: int, refs: dict[int, _Refs]) -> HostCopy:
        """Send a tensor unless the running forward has sent it before: several calls may save one tensor."""
        layout = (tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        key = (storage_id(tensor), tensor._version, *layout)
        sent = self._sent_copies.get(key)
        host_copy = None if sent is None else sent[1]()
        if host_copy is not None:
            refs.setdefault(microbatch, []).append(weakref.ref(host_copy))
            return host_copy
        host_copy = self._send(tensor, microbatch, refs)
        self._sent_copies[key] = WeakStorage(tensor), weakref.ref(host_copy)
        return host_copy

    def _send(self, tensor: Tensor, microbatch: int, refs: dict[int, _Refs]) -> HostCopy:
        with torch.no_grad():
            host_copy = HostCopy(tensor, self._streams)
        if self._streams is not None:
            self._leaving.setdefault(microbatch, []).append(host_copy)
        refs.setdefault(microbatch, []).append(weakref.ref(host_copy))
        return host_copy

    def _free(self, microbatch: int) -> None:
        leaving = self._leaving.pop(microbatch, ())
        if leaving:
            leaving[-1].wait_until_sent()
        for host_copy in leaving:
            host_copy.release_source()

    def _must_stay(self, tensor: Tensor) -> bool:
        return not self._can_offload(tensor) or storage_id(tensor) in self._resident_storages

    def _can_offload(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and can_offload(tensor, self._kind)


def can_offload(tensor: Tensor, kind: type[Tensor] = Tensor) -> bool:
    """Whether a tensor can go to the host. Plain ones can; foreign subclasses, sparse and quantized ones stay.

    Args:
        kind: what plain ones are on the device.
    """
    plain = type(tensor) is kind and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not (tensor.is_conj() or tensor.is_neg()) and tensor.numel() > 0


def _unpack(saved: Saved) -> Tensor:
    with torch.no_grad():
        return saved.get()


def _start_fetching(refs: Sequence[weakref.ref[HostCopy]]) -> None:
    """Start to fetch all of them, the last first: backward needs them in this order."""
    with torch.no_grad():
        for host_copy in reversed(list(_alive(refs))):
            host_copy.start_fetch()


def _alive(refs: Iterable[weakref.ref[HostCopy]]) -> Iterator[HostCopy]:
    for ref in refs:
        host_copy = ref()
        if host_copy is not None:
            yield host_copy


def notes(offload: Sequence[bool], order: Schedule, on_host: Sequence[bool]) -> list[str]:
    """Return the notes on what offload does not do.

    Args:
        offload: one per stage of the model.
        order: the schedule, with or without communication.
        on_host: for each rank, whether it computes on the CPU.
    """
    rank_of = order.placement.rank_of
    offloaded = [stage for stage in range(len(rank_of)) if offload[stage % len(offload)]]
    idle = [stage for stage in offloaded if not offload_trips(order.rows[rank_of[stage]], stage).any]
    on_cpu = [stage for stage in offloaded if on_host[rank_of[stage]] and stage not in idle]
    messages = []
    if idle:
        messages.append(
            f"offload: nothing goes to the host on {name_stages(idle)}, where each backward comes within {NEAR} "
            "computations of its forward: what travels meanwhile makes no room"
        )
    if on_cpu:
        messages.append(f"offload: {name_stages(on_cpu)} on the CPU: the copies are made, and save no memory")
    return messages
