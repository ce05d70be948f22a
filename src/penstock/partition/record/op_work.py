"""What operators do by their schemas, and how much work a call is, to balance the stages before anything is timed.

Work is counted in floating-point operations, forward and backward: a product's own, from torch's table of formulas, and
for every call the bytes that it moves, as the number of operations that the processor could do in that time. Norms,
activations and depthwise convolutions hardly calculate, yet take time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

OPERATIONS_PER_BYTE = 10
"""The operations a processor does while it moves a byte: about 5 on a CPU core, 15 on a GPU (float32). A whole number,
so that sums of work are exact."""

FREE = ("prim", "_unsafe_view", "detach", "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
LOOKUPS = ("embedding", "index", "index_select", "gather", "slice_scatter", "_embedding_bag")

Group = Literal["free", "lookup", "product", "other"]


class OpCall(NamedTuple):
    """A call of an operator, and what it returned."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    result: Any


def count_work(call: OpCall, inputs: Sequence[Tensor], outputs: Sequence[Tensor], trains: bool) -> int:
    """Return the work of one call of an operator, including its backward.

    Args:
        call: the call and its result.
        inputs, outputs: the tensors among its arguments and in its result.
        trains: whether gradients are recorded; if so, those of arguments that require one count too.
    """
    group = find_group(call.func)
    if group == "free":
        return 0
    trained = [tensor for tensor in inputs if trains and tensor.requires_grad]
    if group == "lookup":  # reads only the requested rows, but its backward writes a gradient for all of them
        moved = 2 * _bytes(outputs) + (_bytes(outputs) + 2 * _bytes(trained))
        return OPERATIONS_PER_BYTE * moved
    moved = (_bytes(inputs) + _bytes(outputs)) * (3 if trained else 1)
    operations = count_operations(call) if group == "product" else 0
    factors = sum(tensor.ndim > 1 for tensor in trained)  # a bias is not a factor
    return operations * (1 + min(factors, 2)) + OPERATIONS_PER_BYTE * moved


@functools.cache
def find_group(func: Any) -> Group:
    """Return what kind of work an operator does."""
    packet = func.overloadpacket
    name = packet.__name__
    if func.namespace == "prim" or name in FREE or func.is_view:
        return "free"
    if name in LOOKUPS:
        return "lookup"
    return "product" if packet in flop_registry or name in _FORMULAS else "other"


def count_operations(call: OpCall) -> int:
    """Return the floating-point operations of a product; 0 if there is no formula for it."""
    packet = call.func.overloadpacket
    try:
        if packet in flop_registry:
            return int(flop_registry[packet](*call.args, **call.kwargs, out_val=call.result))
        return _FORMULAS[packet.__name__](*call.args)
    except (TypeError, ValueError, AssertionError, AttributeError, IndexError):  # no formula for arguments like these
        return 0


def list_tensors(values: Iterable[Any]) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results."""
    tensors = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, (list, tuple)):
            tensors += [item for item in value if isinstance(item, Tensor)]
    return tensors


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any) -> int:
    return int(sdpa_backward_flop_count(gradient.shape, query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _grouped(first: Tensor, second: Tensor, *_: Any) -> int:
    """Count a grouped product: each group of the rows meets its own matrix; if only the inner dimension is in groups,
    all of it meets all."""
    groups = first.shape[0] if first.ndim == second.ndim == 3 else 1
    return 2 * groups * first.shape[-2] * first.shape[-1] * second.shape[-1]


def _recurrent(x: Tensor, *weights: Any) -> int:
    """Count a recurrent layer: each row of the input, at each time step, meets each weight once."""
    rows = prod(x.shape[:-1])
    return 2 * rows * sum(tensor.numel() for tensor in list_tensors(weights) if tensor.ndim == 2)


def _recurrent_backward(x: Tensor, *weights: Any) -> int:
    """Count the gradients of the input and of the weights of a recurrent layer."""
    return 2 * _recurrent(x, *weights[:4])


_FORMULAS: Mapping[str, Callable[..., int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "_grouped_mm": _grouped,
    "mkldnn_rnn_layer": _recurrent,
    "mkldnn_rnn_layer_backward": _recurrent_backward,
    "_cudnn_rnn": _recurrent,
}
"""Formulas for products that are not in torch's table."""


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


RUNNING = ("running_mean", "running_var")
"""Arguments of batch norm that are updated only in training, whatever the schema says."""

OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "bernoulli_", "exponential_")
"""Operators that write all of their first argument, and take nothing of what was there."""

SHAPES = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())  # noqa: SIM905
"""Operators that use only the shape and kind of their first argument."""


@functools.cache
def is_seeded(operator: Any) -> bool:
    """Whether an operator draws random numbers, unless its arguments say otherwise."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())  # flex_attention's has none


@functools.cache
def argument_names(func: Any) -> tuple[str, ...]:
    return tuple(argument.name for argument in func._schema.arguments)


class OpTraits(NamedTuple):
    """What an operator does by its schema.

    Attributes:
        draws: whether it draws random numbers, unless its arguments say otherwise.
        writes: the arguments that it updates in place. These include batch norm's running statistics, although the
            schemas of some of its operators do not say so.
        overwrites: whether it takes nothing of what was in the first of them.
        takes_shapes: whether it uses only the shape and kind of its first argument.
        aliases: whether it returns another view of its first argument. (Lifting a new constant does not count.)
        is_view: whether it does, and takes nothing of the contents.
    """

    draws: bool
    writes: tuple[str, ...] = ()
    overwrites: bool = False
    takes_shapes: bool = False
    aliases: bool = False
    is_view: bool = False


@functools.cache
def get_traits(operator: Any) -> OpTraits:
    if not isinstance(operator, torch._ops.OpOverload):
        return OpTraits(is_seeded(operator))
    schema, name = operator._schema, operator._opname
    writes = tuple(
        argument.name
        for argument in schema.arguments
        if (argument.alias_info is not None and argument.alias_info.is_write)
        or (argument.name in RUNNING and "batch_norm" in schema.name)
    )
    aliases = any(r.alias_info is not None for r in schema.returns) and name != "lift_fresh"
    overwrites, is_view = name in OVERWRITES or "out" in writes, aliases and not schema.is_mutable
    return OpTraits(is_seeded(operator), writes, overwrites, name in SHAPES, aliases, is_view)
