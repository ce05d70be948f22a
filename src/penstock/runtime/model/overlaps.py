"""Refuses two parameters in one memory on ranks of several processes, where each would be updated alone.

Public models tie so: `out.weight.data = embedding.weight.data`, or a slice or the transpose of it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from itertools import combinations

from torch import Tensor

from penstock._base.compat import storage_of
from penstock.errors import ArgumentError
from penstock.partition.values.memory import overlap
from penstock.runtime.front_end import Stage


def refuse_overlaps(stages: Sequence[Stage], place_of: Callable[[int], Hashable]) -> None:
    """Raises ArgumentError if two parameters overlap, one is trained, and they are in different processes.

    A parameter with two names is a tie, and is kept equal. Parameters next to each other in one allocation share
    nothing, nor do columns of one matrix.

    Args:
        stages: all stages.
        place_of: returns the process, or the device, of a stage.
    """
    found: dict[int, list[tuple[str, int, Tensor]]] = {}
    for stage in stages:
        for name, tensor in stage.parameters.items():
            if not tensor.is_meta and tensor.numel():
                found.setdefault(storage_of(tensor), []).append((name, stage.meta.index, tensor))
    for entries in found.values():
        for (name, index, one), (other_name, other_index, other) in combinations(entries, 2):
            apart = name != other_name and place_of(index) != place_of(other_index)
            if apart and (one.requires_grad or other.requires_grad) and overlap(one, other):
                raise ArgumentError(
                    f"{name!r} on stage {index} and {other_name!r} on stage {other_index} are two parameters in the "
                    "same memory: in processes of their own, each would be updated alone. Make them one (b.weight = "
                    "a.weight, which is a tie), or give each its own memory (nn.Parameter(a.weight.detach().clone()))"
                )
