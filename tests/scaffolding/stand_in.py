"""A stand-in for a device other than the CPU, for machines that have none: its tensors keep their values in CPU memory,
refuse to mix with CPU tensors, and compute the same bits as the CPU. `install` is permanent: use separate ranks.

It counts whatever makes the host wait for a device: values that are read, tensors that are copied to the host or from
it, unless that does not block, events.

Operators compute at once. Copies that do not block are made as late as possible, and the device may hang: see
`scaffolding.stand_in_streams`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_iter, tree_map_only

from penstock.runtime.exact import rules
from scaffolding import stand_in_streams as streams
from scaffolding.stand_in_streams import Event as Event
from scaffolding.stand_in_streams import calls as calls
from scaffolding.stand_in_streams import go_on as go_on
from scaffolding.stand_in_streams import hang as hang
from scaffolding.stand_in_streams import wait
from scaffolding.stand_in_streams import waits as waits  # by operator; "to host" for copies of tensors

DEVICE = "standin"

aten = torch.ops.aten

READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.is_nonzero.default),
    *(aten.masked_select.default, aten._unique2.default),
}
"""Operators that make the host wait."""

RESIZED = ("arange", "arange.start", "arange.start_step", "linspace", "eye", "eye.m", "randperm")
"""Operators in which torch resizes an empty tensor, which a wrapper of another tensor cannot follow."""

_kept: list[torch.library.Library] = []


class StandIn(Tensor):
    """A tensor on the stand-in device; `values` is a CPU tensor."""

    values: Tensor
    streams: set[int]
    """Those that may use its memory, by `stream_id`."""
    made_at: int

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> StandIn:
        made: StandIn = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            device=torch.device(DEVICE, 0),
        )
        made.values, made.streams, made.made_at = values, {streams.current().stream_id}, next(streams.now)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"StandIn({self.values})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fake = next((t.fake_mode for t in tree_iter((args, kwargs)) if isinstance(t, FakeTensor)), None)
        if fake is not None:  # fake tensors cannot handle tensors of other classes
            with fake:
                args, kwargs = tree_map_only(StandIn, _without_values, (args, kwargs))
                return func(*args, **kwargs)
        strangers = [t for t in tree_iter((args, kwargs)) if isinstance(t, Tensor) and not isinstance(t, StandIn)]
        if func is not aten.copy_.default and any(t.dim() for t in strangers):
            raise RuntimeError(f"{func}: expected all tensors on one device, found {DEVICE} and {strangers[0].device}")
        if func is aten.record_stream.default:
            args[0].streams.add(args[1].stream_id)
            return None
        streams.check_used_here(t for t in tree_iter((args, kwargs)) if isinstance(t, StandIn))
        if func is aten.copy_.default and streams.copies_later(*args, **kwargs):
            return args[0]
        if func in READS:
            wait(str(func))
        target = torch.device(kwargs.get("device") or DEVICE)
        here = {**kwargs, "device": "cpu"} if kwargs.get("device") is not None else kwargs
        plain_args, plain_kwargs = tree_map_only(StandIn, lambda t: t.values, (args, here))
        if func is aten.copy_.default and strangers:
            _wait_for_copy(*args, **kwargs)
        made = func(*plain_args, **plain_kwargs)
        if target.type != DEVICE:
            wait("to host")
            return tree_map_only(Tensor, torch.clone, made)
        return return_and_correct_aliasing(func, args, kwargs, tree_map_only(Tensor, StandIn, made))


class _Module(backend_registration._DummyBackendModule):
    Stream, Event = streams.Stream, streams.Event
    current_stream, stream = staticmethod(streams.current), staticmethod(streams.on)

    def set_device(self, device: Any) -> None: ...

    def device(self, device: Any = None) -> AbstractContextManager[None]:
        return nullcontext()

    def synchronize(self, device: Any = None) -> None:
        wait("device")

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def install() -> None:
    """Registers the device unless it is already registered."""
    if _kept:
        return
    backend_registration._setup_privateuseone_for_python_backend(DEVICE, _Module())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for name in RESIZED:
        library.impl(name, partial(_made, getattr(aten, name.partition(".")[0])), "PrivateUse1")
    library.impl("linear", _linear, "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    streams.install_pinned_memory()
    on_memory_of = rules.share_memory
    rules.share_memory = lambda memory, *place: (
        StandIn(on_memory_of(memory.values, *place)) if isinstance(memory, StandIn) else on_memory_of(memory, *place)
    )
    torch.__future__.set_swap_module_params_on_conversion(True)  # `Module.to` keeps parameters, as it does for CUDA
    _kept.extend([library, others])


def on_the_device(rank: int, job: Callable[..., Any], *args: Any) -> Any:
    """Runs a job where the device is."""
    torch.set_num_threads(1)
    install()
    return job(*args)


def _wait_for_copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> None:
    if not isinstance(target, StandIn):
        wait("to host")
    elif not non_blocking:
        wait("from host")


def _without_values(tensor: StandIn) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _empty(size: Any, *, dtype: Any = None, memory_format: Any = None, **_: Any) -> Tensor:
    return StandIn(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format))


def _empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> Tensor:
    return StandIn(torch.empty_strided(size, stride, dtype=dtype))


def _copy_from(source: Tensor, target: StandIn, non_blocking: bool = False) -> StandIn:
    target.values.copy_(source)
    return target


def _made(
    function: Any, *args: Any, device: Any = None, layout: Any = None, pin_memory: Any = None, **given: Any
) -> Tensor:
    return StandIn(function(*args, **given))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A linear layer as autocast runs it, in lower precision."""
    dtype = torch.get_autocast_dtype(DEVICE)
    with torch.autocast(DEVICE, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
