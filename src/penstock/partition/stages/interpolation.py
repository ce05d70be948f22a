"""One recording for many lengths: sequences that grow, batches that shrink.

Partitions recorded for some lengths may differ only in numbers that follow the length: `arange(6)`, `view(-1, 7, 32)`.
Then that of any length between them needs no recording. Not beyond them: a forward may compare a length with a bound.
Two of the lengths are made up, up to twice the longest: a prime, for which no padding to a multiple looks like a
length, and a power of 2, for a forward that does something else for multiples. Pieces run their own code anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from itertools import accumulate
from math import isqrt
from operator import attrgetter, mul
from typing import Any

import torch
from torch import Tensor, fx

from penstock._base.stages import TensorMeta
from penstock.partition.stages.partition import Leaf, Partition
from penstock.partition.stages.stage import with_arguments

Dims = tuple[tuple[int, ...], ...]
"""For each leaf of the inputs, the dimensions that have the length."""

TRIALS = 3
"""How often to look, in vain, for what follows the length."""

UNLIMITED = 2**62

NOTES = ("work", "notes", "origins")
"""What a partition says for the user, which is that of the first length."""


class Lengths:
    """Partitions of inputs that differ in one length only.

    Args:
        key: what else they were recorded for.
        leaves: the description of such inputs.
    """

    def __init__(self, key: Hashable, leaves: Sequence[Leaf], partition: Partition) -> None:
        self._key, self._leaves, self._first = key, leaves, partition
        self._dims: Dims | None = None
        self._recorded: dict[int, Partition] = {}
        self._verified: Mapping[int, Partition] = {}
        self._trials, self._limit = TRIALS, UNLIMITED

    def at(self, key: Hashable, leaves: Sequence[Leaf], inputs: Sequence[Any]) -> Partition | None:
        """Return the partition of inputs of a length between those recorded; None if it must be recorded."""
        match, ends = self._find(key, leaves), (min(self._verified, default=1), max(self._verified, default=0))
        if match is None or not ends[0] <= match[1] <= ends[1]:
            return None
        partition = _partition({end: self._verified[end] for end in ends}, match[1])
        return partition if partition.holds(inputs) else None

    def learn(
        self, key: Hashable, leaves: Sequence[Leaf], partition: Partition, probe: Callable[[Dims, int], Partition]
    ) -> bool:
        """Add what was recorded for another length, and, from three on, look for what follows the length. Return
        whether these inputs differ in the length only. `probe`: records the same inputs at another length."""
        match = self._find(key, leaves)
        if match is None or _readings(partition) != _readings(self._first):
            return False
        if not self._trials:
            return True
        self._dims = match[2]
        self._recorded = {**(self._recorded or {match[0]: self._first}), match[1]: partition}
        longest = max(self._recorded)
        if len(self._recorded) < 3:
            return True
        for bound in (min(2 * longest, (longest + self._limit) // 2), longest):
            prime = next(n for n in range(bound, 1, -1) if all(n % d for d in range(2, isqrt(n) + 1)))
            try:
                recorded = {**self._recorded, **self._verified}
                _partition(recorded, longest)
                recorded |= {n: probe(self._dims, n) for n in (prime, 1 << bound.bit_length() - 1) if n not in recorded}
                _partition(recorded, longest)
                self._verified = recorded
                return True
            except Exception:
                self._limit = min(self._limit, bound)  # the model may not take longer ones
        self._trials, self._limit = self._trials - 1, UNLIMITED
        del self._recorded[min(self._recorded)]  # a length of 1 may be special
        return True

    def _find(self, key: Hashable, leaves: Sequence[Leaf]) -> tuple[int, int, Dims] | None:
        """Return the first length, that of these inputs, and its dimensions; None if these differ in anything else."""
        difference = _difference(self._leaves, leaves) if key == self._key else None
        return difference if difference is not None and self._dims in (None, difference[2]) else None


def _readings(partition: Partition) -> list[Any]:
    return [(guard.inputs, type(guard.expected), guard.expected, guard.source_line) for guard in partition.guards]


def _difference(leaves: Sequence[Leaf], other_leaves: Sequence[Leaf]) -> tuple[int, int, Dims] | None:
    pairs, dims = set[tuple[int, int]](), []
    for leaf, other_leaf in zip(leaves, other_leaves, strict=True):
        leaf_dims: list[int] = []
        if leaf != other_leaf or leaf[0] == "object":
            if not leaf[0] == other_leaf[0] == "tensor" or not (_is_packed(leaf) and _is_packed(other_leaf)):
                return None
            shapes: Any = (leaf[1], other_leaf[1])
            if len(shapes[0]) != len(shapes[1]) or (leaf[2], *leaf[4:]) != (other_leaf[2], *other_leaf[4:]):
                return None
            leaf_dims = [dim for dim, (n, m) in enumerate(zip(*shapes, strict=True)) if n != m]
            pairs |= {(shapes[0][dim], shapes[1][dim]) for dim in leaf_dims}
        dims.append(tuple(leaf_dims))
    return (*pairs.pop(), tuple(dims)) if len(pairs) == 1 else None


def resize_inputs(leaves: Sequence[Any], dims: Dims, length: int) -> list[Any]:
    """Return inputs of another length, which repeat these."""
    resized = list(leaves)
    for index, leaf_dims in enumerate(dims):
        for dim in leaf_dims:
            value = resized[index]
            indices = torch.arange(length, device=value.device) % value.shape[dim]
            resized[index] = value.detach().index_select(dim, indices).requires_grad_(value.requires_grad)
    return resized


def _is_packed(leaf: Any) -> bool:
    return bool(leaf[3] == tuple(step if n > 1 else 0 for n, step in zip(leaf[1], _strides(leaf[1]), strict=True)))


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a packed tensor."""
    return tuple(accumulate(reversed(shape[1:]), mul, initial=1))[::-1] if shape else ()


def _partition(recorded: Mapping[int, Partition], length: int) -> Partition:
    """Build the partition for a length. Raise ValueError if more differs than numbers that follow the length, or if
    anything is kept from call to call."""
    first, *others = recorded.values()
    if first.left or any(s.remembered or s.depends_on_values or s.meta.branches for s in first.stages):
        raise ValueError
    _require_same([(partition.draw_offsets, *_readings(partition)) for partition in (first, *others)])
    partition: Partition = _fit((first, *others), [*recorded], length)
    return partition


def _require_same(values: Sequence[Any]) -> Any:
    first = values[0]
    if any(value is not first and (isinstance(first, Tensor) or value != first) for value in values):
        raise ValueError
    return first


def _fit(values: Sequence[Any], lengths: Sequence[int], target: int) -> Any:
    """Extrapolate the value at one length from those at others."""
    fit, first = partial(_fit, lengths=lengths, target=target), values[0]
    if all(value is first for value in values):
        return first
    if isinstance(first, fx.GraphModule):
        columns = list(zip(*(module.graph.nodes for module in values), strict=True))
        for nodes in columns:
            _require_same([(node.op, node.name, node.target, node.meta) for node in nodes])
            if nodes[0].op == "get_attr":
                _require_same([attrgetter(str(nodes[0].target))(module) for module in values])
        return with_arguments(first, [fit([(node.args, node.kwargs) for node in nodes]) for nodes in columns])
    kind = _require_same([type(value) for value in values])
    if kind is int and len({*values}) > 1:
        slope = (values[1] - first) // (lengths[1] - lengths[0])
        _require_same([value - slope * length for value, length in zip(values, lengths, strict=True)])
        return first + slope * (target - lengths[0])
    if kind is TensorMeta and all(value.stride == _strides(value.shape) for value in values):
        _require_same([(value.dtype, value.requires_grad) for value in values])
        shape = fit([value.shape for value in values])
        return replace(first, shape=shape, stride=_strides(shape))
    if is_dataclass(kind):
        names = [f.name for f in fields(kind) if f.name not in NOTES]
        return replace(first, **{name: fit([getattr(value, name) for value in values]) for name in names})
    if kind is slice:
        return slice(*fit([(value.start, value.stop, value.step) for value in values]))
    if isinstance(first, dict):
        _require_same([list(value) for value in values])
        return {key: fit([value[key] for value in values]) for key in first}
    if kind is tuple or isinstance(first, list):
        return kind([fit(column) for column in zip(*values, strict=True)])
    return first if kind is fx.Node and _require_same([value.name for value in values]) else _require_same(values)
