"""The parts of torch (2.11 to 2.15) that may move without notice: fake tensors, pytrees, saved tensors, and the
device and limit of a process group have no public home yet.

If a new torch moves one, the tests of what uses it fail; `tests/test_compat.py` has what these do not show. Other
modules use only private names that have been the same for years; `tests/test_private_parts.py` lists them.
"""

from __future__ import annotations

import collections
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from penstock._base.closures import Closure, replace_functions

__all__ = [
    "DATA_DEPENDENT",
    "UNSUPPORTED",
    "FakeTensor",
    "FakeTensorMode",
    "WeakStorage",
    "fake_mode",
    "flex_attention",
    "holders",
    "is_block_mask",
    "quiet",
    "storage_bytes",
    "storage_id",
    "unset_fake_temporarily",
]

DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)
"""Raised by a fake tensor when the program asks for its values."""

UNSUPPORTED = (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError)
"""Raised by a fake tensor for an operator whose result it cannot describe."""


def fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors are fake, with static shapes. Real tensors may be mixed in.

    `export`: the fake of a real number has no value either. Torch 2.15 would give it one, as if it were a constant.
    """
    return FakeTensorMode(allow_non_fake_inputs=True, export=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging the traceback when a fake kernel fails: the caller has a remedy.

    Also keeps it from compiling: dynamo never again compiles code that it once met under a dispatch mode.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        logger.disabled = before


class Opened(NamedTuple):
    """What torch's pytrees know about a value: its children, and how Python writes the path to each.

    `rebuild(children, context)` makes the value again.
    """

    children: Sequence[Any]
    keys: Sequence[str]
    context: Any
    rebuild: Callable[[Sequence[Any], Any], Any]


def open_value(value: Any) -> Opened | None:
    """Open a value that torch's pytrees know: a named tuple, a torch result, a type that a library registered.

    None for any other value.
    """
    if type(value) is Closure:
        return Opened(value.contents, ["[0]", "[1]", "[2]"], value.make, lambda contents, make: make(*contents))
    if is_block_mask(value):
        names = tuple(vars(value))
        return Opened(replace_functions([*vars(value).values()]), [f".{name}" for name in names], names, _block_mask)
    plain_tuple = type(value).__bases__ == (tuple,) and pytree.is_namedtuple_instance(value)
    kind: Any = collections.namedtuple if plain_tuple else type(value)
    node = pytree.SUPPORTED_NODES.get(kind)
    if node is None:
        return None
    children, context = node.flatten_fn(value)
    if node.flatten_with_keys_fn is None:
        keys = [f"[{index}]" for index in range(len(children))]
    else:
        keys = [str(key) for key, _ in node.flatten_with_keys_fn(value)[0]]
    return Opened(children, keys, context, node.unflatten_fn)


def is_block_mask(value: Any) -> bool:
    """Whether this is a `BlockMask` of FlexAttention."""
    flex = flex_attention()
    return flex is not None and isinstance(value, flex.BlockMask)


def flex_attention() -> Any:
    """Return the module of FlexAttention; None if it is not loaded: there are no masks then."""
    return sys.modules.get("torch.nn.attention.flex_attention")


def _block_mask(children: Sequence[Any], names: Sequence[str]) -> Any:
    mask = object.__new__(flex_attention().BlockMask)
    vars(mask).update(zip(names, children, strict=True))
    return mask


def storage_id(tensor: Tensor) -> int:
    """Identify the memory behind a tensor, for as long as it lives. Views of each other share it."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return id(tensor)


def storage_bytes(tensor: Tensor) -> int:
    """Return the size in bytes of the memory behind a tensor, which may use only part of it; of a sparse tensor's
    values."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):
        return tensor._nnz() * tensor.element_size() if tensor.layout == torch.sparse_coo else 0


def holders(tensor: Tensor, node: Node | None) -> int:
    """Return how many tensors hold the memory behind `tensor`, itself included, without the one that `node`, which made
    it, saved of its own result. A number above 1 if torch does not report it."""
    try:
        storage = tensor.untyped_storage()
        count = 2 if _USE_COUNT is None else int(_USE_COUNT(storage._cdata)) - 1  # without `storage`
    except (NotImplementedError, RuntimeError):  # sparse tensors have no storage
        return 1
    if count > 1 and (raw := getattr(node, "_raw_saved_result", None)) is not None:
        saved = getattr(raw, "data", None)  # the result of hooks on saved tensors, if there are any
        count -= isinstance(saved, Tensor) and saved.untyped_storage() is storage
    return count


_USE_COUNT: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class WeakStorage:
    """Keeps the number that `storage_id` returned from being reused, without keeping the memory alive."""

    __slots__ = ("_reference", "number")

    def __init__(self, tensor: Tensor) -> None:
        self.number = storage_id(tensor)
        self._reference: object
        try:
            self._reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
        except (NotImplementedError, RuntimeError):  # a sparse tensor has no storage: its number is its own id
            self._reference = tensor

    @property
    def is_alive(self) -> bool:
        """Whether any tensor still uses that memory."""
        return isinstance(self._reference, StorageWeakRef) and not self._reference.expired()  # type: ignore[no-untyped-call]


def cpu_allocations(run: Callable[[], None]) -> list[tuple[str, int]] | None:
    """Return what torch's CPU allocator allocates (bytes above 0) and frees (below) while this runs, in order, among
    the names of the ranges that begin (`record_function`). None if torch does not report it, or is being profiled
    already.

    The older of torch's profilers: the newer one takes a second to start, and writes to the terminal.
    """
    api: Any = torch.autograd
    try:
        if api.profiler._is_profiler_enabled:
            return None
        config = torch._C._profiler._ExperimentalConfig()
        api._enable_profiler_legacy(api.ProfilerConfig(api.ProfilerState.CPU, False, True, False, False, False, config))
    except (AttributeError, TypeError, RuntimeError):
        return None
    try:
        run()
    finally:
        threads = api._disable_profiler_legacy()
    kinds: tuple[Any, ...] = "memory_alloc", "push"
    return [(event.name(), event.cpu_memory_usage()) for events in threads for event in events if event.kind() in kinds]


def autocast_state(device: torch.device) -> tuple[bool, torch.dtype, bool]:
    """Whether autocast is on for the device, its dtype, and whether it caches cast parameters."""
    kind = device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


any_autocast: Callable[[], bool] = torch._C._is_any_autocast_enabled
"""Whether autocast is on for any type of device."""


def autocast_kinds() -> tuple[str, ...]:
    """Return the types of devices that autocast can be on for: the CPU, CUDA, and the accelerator here if it is
    another."""
    accelerator = torch.accelerator.current_accelerator()
    return tuple(dict.fromkeys(("cpu", "cuda", *(() if accelerator is None else (accelerator.type,)))))


def is_accelerator(device: torch.device) -> bool:
    """Whether a device has memory of its own, which others cannot see."""
    return device.type not in ("cpu", "meta")


def device_generator(device: torch.device) -> torch.Generator:
    """Return the default generator of a device; the CPU's where the device has none of its own."""
    if not is_accelerator(device):
        return torch.default_generator
    module = torch.get_device_module(device)
    generators: Sequence[torch.Generator] = getattr(module, "default_generators", ())
    if not generators:
        return torch.default_generator
    return generators[module.current_device() if device.index is None else device.index]


def has_global_backward_hooks() -> bool:
    """Whether backward hooks for all modules are registered (`register_module_full_backward_hook`)."""
    hooks = torch.nn.modules.module
    return bool(hooks._global_backward_hooks or hooks._global_backward_pre_hooks)


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks on the gradient of each backward (`register_hook`)."""
    return bool(parameter._backward_hooks)


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether a parameter has hooks on its accumulated gradient (`register_post_accumulate_grad_hook`)."""
    return bool(parameter._post_accumulate_grad_hooks)


def reduction_dtype(part: nn.Module) -> torch.dtype | None:
    """Return the dtype in which a module that `fully_shard` was applied to sums gradients; None: in that of its
    parameters.

    FSDP takes it as a `MixedPrecisionPolicy`, and has no public way to ask for it.
    """
    state: Any = part._get_fsdp_state()  # type: ignore[operator]
    dtype: torch.dtype | None = state._mp_policy.reduce_dtype
    return dtype


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """`torch.autograd.graph.get_gradient_edge` without its check of the node's type, which takes longer."""
    node: Any = tensor.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):  # a leaf, or the node of a function in Python
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


def run_backward(roots: Sequence[GradientEdge], grads: Sequence[Tensor]) -> None:
    """`torch.autograd.backward` without its checks of arguments, which take longer than a small stage.

    The engine itself checks shapes, dtypes and devices of the gradients against the roots. On the CPU, where it runs in
    this thread, torch's settings for other threads are left out too.
    """
    run = _ENGINE.run_backward if grads[0].is_cpu else _RUN_BACKWARD
    run(tuple(roots), tuple(grads), False, False, (), allow_unreachable=True, accumulate_grad=True)


class WithoutGradients:
    """`torch.no_grad()` with a quarter of its calls. May be entered again, but not twice at once."""

    def __enter__(self) -> None:
        self._before = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._before)


_ENGINE: Any = torch.autograd.Variable._execution_engine
_RUN_BACKWARD: Any = torch.autograd.graph._engine_run_backward


def plain_tensors() -> AbstractContextManager[None]:
    """Return a context in which `__torch_function__` of tensor subclasses is not called."""
    guard: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return guard


def default_store() -> Any:
    """Return the store of the default process group, where the processes of a job met."""
    from torch.distributed.distributed_c10d import _get_default_store  # torch.distributed takes long to import

    return _get_default_store()


def is_bound() -> bool:
    """Whether the default process group has a device (`init_process_group(device_id=...)`): torch splits other groups
    from it, and gives each of them one communicator."""
    import torch.distributed as dist

    return getattr(dist.group.WORLD, "bound_device_id", None) is not None


@contextmanager
def binding_to(device: torch.device | None) -> Iterator[None]:
    """Give the default process group a device, or none, for a `with` block."""
    import torch.distributed as dist

    default = dist.group.WORLD
    before = getattr(default, "bound_device_id", None)
    if default is None or before == device:
        yield
        return
    default.bound_device_id = device
    try:
        yield
    finally:
        default.bound_device_id = before


def set_limit(options: Any, limit: timedelta) -> None:
    """Set how long an operation may take, in the options of a process group's backend. Torch warns if the group is
    given another limit."""
    if hasattr(options, "_timeout"):
        options._timeout = limit


def saved_tensors_hooks() -> tuple[Callable[..., Any], ...] | None:
    """Return the innermost hooks on saved tensors (`torch.autograd.graph.saved_tensors_hooks`), if any."""
    hooks: tuple[Callable[..., Any], ...] | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def in_checkpoint() -> bool:
    """Whether the running code is inside torch's checkpointing (`use_reentrant=False`), so backward will rerun it."""
    hooks = saved_tensors_hooks()
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def sums_elements(node: Any) -> bool:
    """Whether this node of a graph is one of torch's losses with reduction="sum"; unknown ones are not."""
    return getattr(node, "_saved_reduction", None) == 2


def in_backward() -> bool:
    """Whether this thread computes a backward, in which checkpoints recompute forwards; torch's own check."""
    return torch._C._current_graph_task_id() != -1
