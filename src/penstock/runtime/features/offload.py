"""Offloads activations: what a forward saves for backward goes to the host's memory, and comes back in time.

What a microbatch saves is sent while its forward runs. The memory is free once the rank's next computation has ended,
and everything is fetched from the beginning of the computation before the one that needs it: I needs what autograd
saves, W what it keeps itself. On an accelerator the copies run beside the computation, each way on a stream of its own
(`away.py`; not yet run on any GPU). On the CPU they are made too, and save nothing.

Parameters and buffers stay where they are, and so does what would come back too soon (`schedule/kept.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock._base.compat import WeakStorage, storage_of
from penstock._base.words import in_ranges
from penstock.errors import ArgumentError
from penstock.runtime.exact.saved import Saved, SavedTensor
from penstock.runtime.features.away import Away, lanes_of
from penstock.runtime.features.compiled import any_compiled
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature, Start
from penstock.runtime.gradients.distribution import local
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.kept import NEAR, Trips, trips

_Refs = list[weakref.ref[Away]]


class Offload(Feature):
    """The saved tensors of one stage, and what W needs of its forwards: a `Keeper`.

    Args:
        held: returns the parameters and buffers that live on the stage now and stay there.
        compiled: whether anything in the stage is compiled.

    Attributes:
        pack: takes what autograd saves in a forward. The compiler must not look into it where it runs what it leaves
            uncompiled: it fails on parameters with gradients of another dtype.
    """

    @classmethod
    def of(cls, stage: StageContext) -> Offload | None:
        """If `offload=` asks for it. Raises ArgumentError if something in the stage excludes it."""
        if not stage.training or not stage.offload:
            return None
        if any(isinstance(part, nn.RReLU) and part.training for part in stage.modules()):
            raise ArgumentError(
                "offload: torch saves the noise of nn.RReLU for backward before it has drawn that noise, so other "
                f"numbers would come back; choose offload={{{stage.index}: False}}, or use another activation"
            )
        compiled = stage.binding.compile is not None or any_compiled(stage.modules())
        return cls(stage.index, stage.device, stage.held, trips(stage.row, stage.index), compiled=compiled)

    def __init__(
        self,
        stage: int,
        device: torch.device,
        held: Callable[[], Iterable[Tensor]],
        trips: Trips,
        *,
        compiled: bool = False,
    ) -> None:
        self._stage = stage
        self._held = held
        self._trips = trips
        nothing = torch.empty(0, device=device)
        self._device, self._kind = nothing.device, type(nothing)
        self._lanes = lanes_of(self._device)
        self._stays: set[int] = set()
        self._sent: dict[tuple[Any, ...], tuple[WeakStorage, weakref.ref[Away]]] = {}
        self._leaving: dict[int, list[Away]] = {}
        self._for_backward: dict[int, _Refs] = {}
        self._for_weights: dict[int, _Refs] = {}
        self._microbatch: int | None = None  # whose forward is running
        self.pack: Callable[[Tensor], Saved] = self._pack
        if compiled:
            self.pack = torch.compiler.disable(self._pack)  # type: ignore[no-untyped-call]

    def begin_step(self, start: Start) -> None:
        """Drops anything left by a step that raised."""
        for microbatch in list(self._leaving):
            self._free(microbatch)
        self._for_backward.clear()
        self._for_weights.clear()
        self._microbatch = None

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward: sends what it saves to the host, unless its graph is dropped."""
        if runs_again or microbatch not in self._trips.any:
            yield
            return
        held = (part for tensor in self._held() if (part := local(tensor)).layout is torch.strided)
        self._stays = {storage_of(part) for part in held}  # they may have new memory
        self._microbatch = microbatch
        try:
            with saved_tensors_hooks(self.pack, _unpack):
                yield
        finally:
            self._microbatch = None
            self._sent.clear()

    def past(self, action: Action) -> None:
        """Called once the computation after one of these has ended: frees what a forward sent."""
        if action.op is Op.F:
            assert action.microbatch is not None
            self._free(action.microbatch)

    def upcoming(self, action: Action) -> None:
        """Called before the computation before one of these begins: fetches what a backward needs."""
        assert action.microbatch is not None
        if action.op is not Op.F:
            refs = self._for_weights if action.op is Op.W else self._for_backward
            _bring(refs.get(action.microbatch, ()))

    @contextmanager
    def backward(self, microbatch: int) -> Iterator[None]:
        """Wraps a backward. What it shares with a W that comes much later is fetched once more for that."""
        self._for_backward.pop(microbatch, None)
        yield
        if microbatch in self._trips.twice:
            for away in _alive(self._for_weights.get(microbatch, ())):
                away.drop()

    @contextmanager
    def weights(self, microbatch: int) -> Iterator[None]:
        """Wraps a W."""
        self._for_weights.pop(microbatch, None)
        yield

    def _pack(self, tensor: Tensor) -> Saved:
        if self._microbatch not in self._trips.for_backward or self._stays_here(tensor):
            return SavedTensor(tensor, tensor._version)
        return self._send_once(tensor, self._microbatch, self._for_backward)

    def save(self, tensor: Tensor) -> Saved:
        """Takes what W needs of a forward, or of one that runs again just before it."""
        if self._microbatch not in self._trips.for_weights or self._stays_here(tensor):
            return SavedTensor.of(tensor)
        return self._send_once(tensor, self._microbatch, self._for_weights)

    def takes(self, tensor: Tensor, microbatch: int) -> bool:
        """Whether `send` sends a tensor to the host: it can go, and is away for long enough."""
        return microbatch in self._trips.for_backward and self._can_go(tensor)

    def send(self, tensor: Tensor, microbatch: int) -> Away:
        """Sends a tensor to the host until the backward of a microbatch."""
        return self._send(tensor, microbatch, self._for_backward)

    def _send_once(self, tensor: Tensor, microbatch: int, refs: dict[int, _Refs]) -> Away:
        """The same, unless the running forward has sent it before: several calls may save one tensor."""
        layout = (tensor.dtype, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
        key = (storage_of(tensor), tensor._version, *layout)
        known = self._sent.get(key)
        away = None if known is None else known[1]()
        if away is not None:
            refs.setdefault(microbatch, []).append(weakref.ref(away))
            return away
        away = self._send(tensor, microbatch, refs)
        self._sent[key] = WeakStorage(tensor), weakref.ref(away)
        return away

    def _send(self, tensor: Tensor, microbatch: int, refs: dict[int, _Refs]) -> Away:
        with torch.no_grad():
            away = Away(tensor, self._lanes)
        if self._lanes is not None:
            self._leaving.setdefault(microbatch, []).append(away)
        refs.setdefault(microbatch, []).append(weakref.ref(away))
        return away

    def _free(self, microbatch: int) -> None:
        leaving = self._leaving.pop(microbatch, ())
        if leaving:
            leaving[-1].wait_until_sent()
        for away in leaving:
            away.free()

    def _stays_here(self, tensor: Tensor) -> bool:
        return not self._can_go(tensor) or storage_of(tensor) in self._stays

    def _can_go(self, tensor: Tensor) -> bool:
        return tensor.device == self._device and can_go(tensor, self._kind)


def can_go(tensor: Tensor, kind: type[Tensor] = Tensor) -> bool:
    """Whether a tensor can go to the host. Plain ones can; foreign subclasses, sparse and quantized ones stay.

    Args:
        kind: what plain ones are on the device.
    """
    plain = type(tensor) is kind and tensor.layout is torch.strided and not tensor.is_quantized
    return plain and not (tensor.is_conj() or tensor.is_neg()) and tensor.numel() > 0


def _unpack(saved: Saved) -> Tensor:
    with torch.no_grad():
        return saved.get()


def _bring(refs: Sequence[weakref.ref[Away]]) -> None:
    """Starts to fetch all of them, the last first: backward needs them in this order."""
    with torch.no_grad():
        for away in reversed(list(_alive(refs))):
            away.bring()


def _alive(refs: Iterable[weakref.ref[Away]]) -> Iterator[Away]:
    for ref in refs:
        away = ref()
        if away is not None:
            yield away


def notes(offload: Sequence[bool], order: Schedule, on_host: Sequence[bool]) -> list[str]:
    """Notes on what offload does not do.

    Args:
        offload: one per stage of the model.
        order: the schedule, with or without communication.
        on_host: for each rank, whether it computes on the CPU.
    """
    rank_of = order.placement.rank_of
    asked = [stage for stage in range(len(rank_of)) if offload[stage % len(offload)]]
    idle = [stage for stage in asked if not trips(order.rows[rank_of[stage]], stage).any]
    there = [stage for stage in asked if on_host[rank_of[stage]] and stage not in idle]
    found = []
    if idle:
        found.append(
            f"offload: nothing goes to the host on {_stages(idle)}, where each backward comes within {NEAR} "
            "computations of its forward: what travels meanwhile makes no room"
        )
    if there:
        found.append(f"offload: {_stages(there)} on the CPU: the copies are made, and save no memory")
    return found


def _stages(numbers: Sequence[int]) -> str:
    return f"{'stage' if len(numbers) == 1 else 'stages'} {', '.join(in_ranges(map(str, numbers)))}"
