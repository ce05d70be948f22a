"""Refuses tensors that share memory without being the same parameter or buffer: other processes cannot see that."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

from torch import Tensor

from penstock.compat import storage_of
from penstock.errors import ArgumentError
from penstock.partition.values.memory import ANYWHERE, bytes_of, overlap
from penstock.runtime.front_end import Stage


class _Entry(NamedTuple):
    """One use of an allocation.

    Attributes:
        bytes: the range it occupies.
        what, name, stage: what it is, and where it is used.
        changes: whether training changes it there.
        tensor: None if only the allocation is known.
    """

    bytes: range
    what: str
    name: str
    stage: int
    changes: bool
    tensor: Tensor | None

    def overlaps(self, other: _Entry) -> bool:
        return self.tensor is None or other.tensor is None or overlap(self.tensor, other.tensor)


def refuse_overlaps(stages: Sequence[Stage], place_of: Callable[[int], Hashable]) -> None:
    """Raises ArgumentError if something trained or updated in one place is in memory that is used in another.

    On one device every use would see the change; in several processes the copies would drift apart. A parameter with
    two names is a tie, and is kept equal. Parameters next to each other in one allocation share nothing, nor do columns
    of one matrix.

    Args:
        stages: all stages.
        place_of: returns the process, or the device, of a stage.
    """
    found: dict[int, list[_Entry]] = {}
    for stage in stages:
        for storage, entry in _entries(stage):
            found.setdefault(storage, []).append(entry)
    for entries in found.values():
        entries.sort(key=lambda entry: entry.bytes.start)
        for one, other in combinations(entries, 2):
            apart = one.name != other.name and place_of(one.stage) != place_of(other.stage)
            near = other.bytes.start < one.bytes.stop
            if apart and near and (one.changes or other.changes) and one.overlaps(other):
                raise ArgumentError(_refusal(one, other))


def _entries(stage: Stage) -> Iterator[tuple[int, _Entry]]:
    updated = {*stage.meta.updated, *stage.may_update}
    for what, held in (("parameter", stage.parameters), ("buffer", stage.buffers)):
        for name, tensor in held.items():
            if tensor.device.type != "meta" and tensor.numel():
                changes = name in updated or (what == "parameter" and tensor.requires_grad)
                entry = _Entry(bytes_of(tensor), what, repr(name), stage.meta.index, changes, tensor)
                yield storage_of(tensor), entry
    for storage, who in stage.borrowed.items():
        yield storage, _Entry(ANYWHERE, "tensor", f"a tensor in {who}", stage.meta.index, False, None)


def _refusal(one: _Entry, other: _Entry) -> str:
    if one.what == other.what == "parameter":
        return (
            f"{one.name} on stage {one.stage} and {other.name} on stage {other.stage} are two parameters in the same "
            "memory: in processes of their own, each would be updated alone. Make them one (b.weight = a.weight, which "
            "is a tie), or give each its own memory (nn.Parameter(a.weight.detach().clone()))"
        )
    changed, seen = (one, other) if one.changes else (other, one)
    return (
        f"{changed.name} on stage {changed.stage} is updated in training, and {seen.name} on stage {seen.stage} lies "
        "in the same memory: in a process of its own it would not see that. Use the parameter or buffer itself there "
        "(a.weight.detach() in the forward), cut so that both are on one stage, or give it its own memory (clone())"
    )
