"""Counts what kernels do, which run on tensors without memory as they would on a CPU, whatever device they are for.

So scaled attention is one kernel, as fused ones are, and what would be fused by a compiler is not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from penstock._base.compat import size_of
from penstock.hardware import Operation
from penstock.partition.state.provenance import tensors_of
from penstock.partition.watch.observer import argument_names
from penstock.partition.watch.work import Operation as Call
from penstock.partition.watch.work import group_of, operations_of

OVERWRITES = ("copy_", "fill_", "zero_", "normal_", "uniform_", "bernoulli_", "exponential_")
"""Operators that do not read the tensor that they update."""


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the operations of every kernel while it is entered."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._found: Counter[tuple[int, int, str]] = Counter()

    @property
    def found(self) -> tuple[Operation, ...]:
        """What ran, the same operations together."""
        return tuple(Operation(*what, count) for what, count in self._found.items())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if isinstance(func, torch._ops.OpOverload) and group_of(func) != "free":
            self._found[_counted(Call(func, args, kwargs, result))] += 1
        return result


def _counted(call: Call) -> tuple[int, int, str]:
    """Operations, bytes and dtype of one kernel."""
    given = tensors_of((*call.args, *call.kwargs.values()))
    made = tensors_of(call.result if isinstance(call.result, (list, tuple)) else (call.result,))
    group, name = group_of(call.func), call.func.overloadpacket.__name__
    read = _bytes(given[1:] if name in OVERWRITES else given)
    if group == "lookup":  # of its table, only the rows that are asked for
        read = _bytes(given[1:]) + _bytes(made)
    elif name.endswith("_like") or name.startswith("new_"):
        read = 0
    factor = next((tensor for tensor in given if tensor.is_floating_point()), None)
    if group != "product" or factor is None:
        return 0, read + _bytes(made), "float32"
    return _unmasked(call), read + _bytes(made), _dtype_of(name, factor)


def _unmasked(call: Call) -> int:
    """A product's operations; of causal attention, those below the diagonal."""
    flops = operations_of(call)
    given = dict(zip(argument_names(call.func), call.args, strict=False)) | dict(call.kwargs)
    if given.get("is_causal"):
        length = int(given["query"].shape[-2])
        return flops * (length + 1) // (2 * length)
    return flops


def _dtype_of(name: str, factor: Tensor) -> str:
    """The dtype of a product, where torch may compute in less than float32 with that."""
    if factor.dtype == torch.float32:
        allowed = torch.get_float32_matmul_precision() != "highest"
        return "tf32" if (torch.backends.cudnn.allow_tf32 if "conv" in name else allowed) else "float32"
    return str(factor.dtype).removeprefix("torch.")


def _bytes(tensors: Sequence[Tensor]) -> int:
    """What tensors take of memory: of an expanded one, what is there."""
    return sum(min(tensor.numel() * tensor.element_size(), size_of(tensor)) for tensor in tensors)
