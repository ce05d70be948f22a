"""What one microbatch does and takes on a stage while it is there, by running the stage's code and backward on fake
tensors.

Nothing is computed, and no memory is taken. `MemoryMonitor` counts what kernels do as they would on a CPU, whatever
device the tensors are for: so scaled attention is one kernel, as fused ones are, and what would be fused by a compiler
is not.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._base.compat import fake_mode, quiet, storage_bytes, storage_id
from penstock._base.pytree import flatten
from penstock._base.stages import TensorMeta
from penstock.costs import OpCounts
from penstock.costs.hardware import Operation
from penstock.partition.record.fakes import Snapshot, install_tensors, untouched_generators
from penstock.partition.record.op_work import (
    OVERWRITES,
    OpCall,
    argument_names,
    count_operations,
    find_group,
    list_tensors,
)
from penstock.partition.recording import tensor_meta
from penstock.partition.state.reachable import Reach

_LSTM_VALUES = 9.3, 6.1
"""What `nn.LSTM` keeps on the CPU for each value of its result, and besides for each value of what is wider, its input
or its result (measured: 15.4 for each where the input is no wider, 60 where it is eight times as wide)."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """The bytes that one microbatch takes on a stage, besides parameters, buffers and gradients of parameters.

    Attributes:
        kept: from its forward to its backward, inputs included.
        working: what its forward or its backward takes besides that while it runs, at most.
        inputs, outputs: of `kept`, those of each input and each result that is kept itself; 0 of the others.
        operations: what was done, if that was counted.
    """

    kept: int
    working: int
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    operations: OpCounts | None = None


def footprint(module: nn.Module, inputs: Sequence[TensorMeta], *, with_loss: bool = False) -> Footprint | None:
    """Return what `run_on_fakes` finds; None if the code does not run on fake tensors."""
    try:
        return run_on_fakes(module, inputs, with_loss=with_loss)
    except Exception:  # a model's own code may raise anything there
        return None


def run_on_fakes(
    module: nn.Module, inputs: Sequence[TensorMeta], *, with_loss: bool = False, counts: bool = False
) -> Footprint:
    """Run a stage's code and its backward on fake tensors. Raise whatever the code raises there.

    Args:
        module: takes `inputs` and returns its outputs. What its forward leaves behind is taken back.
        inputs: of one microbatch.
        with_loss: whether a loss follows: one that the module returns, or else `typical_losses`.
        counts: whether to count operations.
    """
    reach = Reach(module)
    try:
        with untouched_generators(), quiet(), fake_mode(), _OnHost(), torch.enable_grad():
            memory, forward, backward = _run(module, inputs, with_loss=with_loss, counts=counts)
            if not counts:
                return memory
            input_backward = backward if any(meta.requires_grad for meta in inputs) else ()
            if input_backward and any(parameter.requires_grad for parameter in module.parameters()):
                *_, input_backward = _run(module, inputs, counts=True, inputs_only=True)
            return replace(memory, operations=OpCounts(forward, backward, input_backward))
    finally:
        reach.restore()


def typical_losses(outputs: Sequence[Tensor]) -> list[Tensor]:
    """Take as much memory as cross entropy: it keeps the logarithms of probabilities. A model's own loss is taken as it
    is."""
    losses = [output for output in outputs if output.dim() == 0 and output.requires_grad]
    if losses:
        return losses
    trained = [output for output in outputs if output.requires_grad]
    return [nn.functional.log_softmax(output, -1).select(-1, 0).mean() for output in trained]


def backward_roots(values: Sequence[Tensor]) -> tuple[list[GradientEdge], Callable[[], list[Tensor]]]:
    """Return where a backward from these values begins, and what makes a gradient of ones for each. Keep no value."""
    trained = [value for value in values if value.requires_grad]
    sizes = [
        (tuple(value.shape), sorted(range(value.dim()), key=value.stride, reverse=True), value.dtype, value.device)
        for value in trained
    ]

    def make_ones() -> list[Tensor]:
        ones = (torch.empty_permuted(shape, order, dtype=dtype, device=device) for shape, order, dtype, device in sizes)
        return [gradient.fill_(1) for gradient in ones]

    return [get_gradient_edge(value) for value in trained], make_ones


def _run(
    module: nn.Module,
    inputs: Sequence[TensorMeta],
    *,
    with_loss: bool = False,
    counts: bool = False,
    inputs_only: bool = False,
) -> tuple[Footprint, tuple[Operation, ...], tuple[Operation, ...]]:
    """Run a module on fake tensors: return its bytes, and what the forward and the backward do. `inputs_only`: compute
    gradients of these alone."""
    state = {id(tensor): _empty_like(tensor_meta(tensor)) for tensor in (*module.parameters(), *module.buffers())}
    for tensor in state.values():
        if tensor.requires_grad:  # so that backward adds to it, as in any microbatch but the first
            tensor.grad = torch.empty_like(tensor)
    leaves = [_empty_like(meta) for meta in inputs]
    uncounted = [*state.values(), *(t.grad for t in state.values() if t.grad is not None), *leaves]
    memory, snapshot = MemoryMonitor(uncounted), Snapshot(module)
    # in place until backward has ended: a model's own checkpoint (timm's DenseNet) runs its modules again there
    install_tensors(module, lambda tensor: state[id(tensor)])
    try:
        with memory:
            copies = [leaf.clone() for leaf in leaves]  # which may be updated in place
            memory.is_counting = counts
            outputs: list[Tensor] = list(module(*copies))
            memory.is_counting = False
            ids_in, ids_out = ([storage_id(value) for value in values] for values in (copies, outputs))
            copies.clear()
            edges, make_ones = backward_roots(typical_losses(outputs) if with_loss else outputs)
            outputs.clear()
            peak, forward = memory.peak, memory.take_ops()
            kept = memory.peak = memory.now
            input_bytes, output_bytes = (tuple(map(memory.living_bytes, storages)) for storages in (ids_in, ids_out))
            gradients = make_ones()
            memory.is_counting = counts
            if edges and inputs_only:
                torch.autograd.grad(edges, [x for x in leaves if x.requires_grad], gradients, allow_unused=True)
            elif edges:
                torch.autograd.backward(edges, gradients)
            memory.is_counting = False
    finally:
        snapshot.restore()
    return Footprint(kept, max(peak, memory.peak) - kept, input_bytes, output_bytes), forward, memory.take_ops()


class MemoryMonitor(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of live tensors that operators make and, while it `is_counting`, what kernels do.

    Args:
        uncounted: tensors whose memory does not count.
    """

    def __init__(self, uncounted: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self.is_counting = False
        self._living: dict[int, Any] = {storage_id(tensor): None for tensor in uncounted}
        self._sizes: dict[int, int] = {}
        self._operations: Counter[tuple[int, int, str]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if self.is_counting and isinstance(func, torch._ops.OpOverload) and find_group(func) != "free":
            self._operations[_operator_cost(OpCall(func, args, kwargs, result))] += 1
        for tensor in flatten(result).leaves:
            if isinstance(tensor, Tensor) and storage_id(tensor) not in self._living:
                self._track(tensor, storage_bytes(tensor))
        if func is torch.ops.aten.mkldnn_rnn_layer.default and torch.is_grad_enabled():  # its workspace, empty on fakes
            width_ratio = max(1.0, args[0].shape[-1] / result[0].shape[-1])
            self._track(result[3], int((_LSTM_VALUES[0] + _LSTM_VALUES[1] * width_ratio) * storage_bytes(result[0])))
        return result

    def take_ops(self) -> tuple[Operation, ...]:
        """Return what ran since the last call, the same operations together."""
        operations = tuple(Operation(*key, count) for key, count in self._operations.items())
        self._operations.clear()
        return operations

    def living_bytes(self, storage: int) -> int:
        """Return the bytes of a tensor's memory; 0 if it does not count, or is freed."""
        return self._sizes.get(storage, 0)

    def _track(self, tensor: Tensor, size: int) -> None:
        storage = storage_id(tensor)

        def release(_: Any) -> None:
            if self._living.pop(storage, None) is not None:
                self.now -= self._sizes.pop(storage)

        self._living[storage] = weakref.ref(tensor.untyped_storage(), release)
        self.now += size - self._sizes.get(storage, 0)
        self._sizes[storage] = size
        self.peak = max(self.peak, self.now)


class _OnHost(TorchFunctionMode):
    """What code makes on a device is on the host, as its fake tensors are: on the meta device, attention would take the
    kernel that keeps all probabilities."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cpu = torch.device("cpu")
        args = [cpu if isinstance(arg, torch.device) else arg for arg in args]
        host_kwargs = {key: cpu if isinstance(value, torch.device) else value for key, value in (kwargs or {}).items()}
        return func(*args, **host_kwargs)


def _empty_like(meta: TensorMeta) -> Tensor:
    empty = torch.empty_strided(meta.shape, meta.stride, dtype=getattr(torch, meta.dtype))
    return empty.requires_grad_(meta.requires_grad)


def _operator_cost(call: OpCall) -> tuple[int, int, str]:
    """Return the operations, bytes and dtype of one kernel."""
    operands = list_tensors((*call.args, *call.kwargs.values()))
    results = list_tensors(call.result if isinstance(call.result, (list, tuple)) else (call.result,))
    group, name = find_group(call.func), call.func.overloadpacket.__name__
    bytes_read = _bytes(operands[1:] if name in OVERWRITES else operands)
    if group == "lookup":  # of its table, only the rows that are asked for
        bytes_read = _bytes(operands[1:]) + _bytes(results)
    elif name.endswith("_like") or name.startswith("new_"):
        bytes_read = 0
    factor = next((tensor for tensor in operands if tensor.is_floating_point()), None)
    if group != "product" or factor is None:
        return 0, bytes_read + _bytes(results), "float32"
    return _count_unmasked(call), bytes_read + _bytes(results), _product_dtype(name, factor)


def _count_unmasked(call: OpCall) -> int:
    """Return a product's operations; of causal attention, those below the diagonal."""
    flops = count_operations(call)
    arguments = dict(zip(argument_names(call.func), call.args, strict=False)) | dict(call.kwargs)
    if arguments.get("is_causal"):
        length = int(arguments["query"].shape[-2])
        return flops * (length + 1) // (2 * length)
    return flops


def _product_dtype(name: str, factor: Tensor) -> str:
    """Return the dtype of a product, where torch may compute in less than float32 with this operand."""
    if factor.dtype == torch.float32:
        allows_tf32 = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if (torch.backends.cudnn.allow_tf32 if "conv" in name else allows_tf32) else "float32"
    return str(factor.dtype).removeprefix("torch.")


def _bytes(tensors: Sequence[Tensor]) -> int:
    """Return the bytes of tensors: of an expanded one, those that are stored."""
    return sum(min(tensor.numel() * tensor.element_size(), storage_bytes(tensor)) for tensor in tensors)
