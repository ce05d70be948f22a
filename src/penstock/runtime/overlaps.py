"""Parameters that share memory without being one parameter, which no other process can see."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations

from torch import Tensor

from penstock.errors import ArgumentError
from penstock.partition._compat import storage_of
from penstock.partition.stage import Stage


def refuse_overlaps(stages: Sequence[Stage], place_of: Callable[[int], Hashable]) -> None:
    """Raises ArgumentError if two parameters that are trained in different places lie in the same memory.

    On one device an update of either changes both. Between processes they would drift apart. A parameter that has two
    names is a tie, and is kept equal; parameters side by side in one allocation share nothing.

    Args:
        place_of: the process, or the device, of a stage.
    """
    found: dict[int, list[tuple[int, int, str, int]]] = {}
    for stage in stages:
        for name, parameter in stage.parameters.items():
            if parameter.requires_grad and parameter.device.type != "meta" and parameter.numel():
                first, end = _range_of(parameter)
                found.setdefault(storage_of(parameter), []).append((first, end, name, stage.meta.index))
    for entries in found.values():
        entries.sort()
        for one, other in combinations(entries, 2):
            if one[2] != other[2] and other[0] < one[1] and place_of(one[3]) != place_of(other[3]):
                raise ArgumentError(
                    f"{one[2]!r} on stage {one[3]} and {other[2]!r} on stage {other[3]} are two parameters in the same "
                    "memory: in processes of their own, each would be updated alone. Make them one (b.weight = "
                    "a.weight, which is a tie), or give each its own memory (nn.Parameter(a.weight.detach().clone()))"
                )


def _range_of(tensor: Tensor) -> tuple[int, int]:
    """The bytes that a tensor lies in, within its storage."""
    last = sum(step * (size - 1) for step, size in zip(tensor.stride(), tensor.size(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + int(last) + 1) * tensor.itemsize
