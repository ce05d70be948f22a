"""Updates in place of what backward needs.

Autograd counts the versions of a tensor and raises where backward meets another one than forward saved, unless the
update went through `.data`. One device then computes with what was written, whatever that means; a stage that holds
another copy, or that runs other microbatches in between, would not. So such updates are found here, and what was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from penstock.errors import PartitionError
from penstock.partition._compat import storage_of
from penstock.partition.recording import Recording


class Watch(BaseException):
    """The forward updates in place what backward may need: record again, and see what is saved for that.

    No Exception, so that the model's own `except` clauses do not take it.
    """


def may_overwrite(recording: Recording, statistics: Collection[int]) -> bool:
    """Whether the forward updates in place what may be saved for backward, so that this is to be looked at.

    `statistics`: the memory of batch norms' running statistics, which is not saved where it is updated.
    """
    facts = recording.facts.values()
    written = frozenset[int]().union(*(fact.writes for fact in facts)).difference(statistics)
    held = [recording.held[name] for storage, name in recording.memory.items() if storage in written]
    return (
        any(fact.unseen for fact in facts)
        or any(tensor.is_floating_point() or tensor.is_complex() for tensor in held)
        or any(each.storage is not None for each in recording.remembered)
    )


class Versions:
    """Of tensors, how often autograd knew them to be updated when that was last asked."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = {id(tensor): tensor._version for tensor in tensors}

    def add(self, tensor: Tensor) -> None:
        self._known[id(tensor)] = tensor._version

    def has_new(self, tensor: Tensor) -> bool:
        """Whether autograd knows of an update since this was last asked."""
        before, self._known[id(tensor)] = self._known[id(tensor)], tensor._version
        return before != tensor._version


class Saved:
    """The memory that the forward saves for backward, collected until `take` is called.

    Args:
        root: the memory that a tensor stands for, where that is not its own.
        is_watched: whether it is looked at; else nothing is collected.
    """

    def __init__(self, root: Callable[[Tensor], int], *, is_watched: bool) -> None:
        self._root, self.is_watched = root, is_watched
        self._storages: set[int] = set()

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self.is_watched:
            yield
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise PartitionError(
                "the forward updates tensors in place that backward may need, and uses what does not let Penstock see "
                f"whether it does ({error}). Make the update out of place"
            ) from error

    def _pack(self, tensor: Tensor) -> Tensor:
        self._storages |= {storage_of(tensor), self._root(tensor)}
        return tensor

    def take(self) -> frozenset[int]:
        """What was saved since the last call."""
        found = frozenset(self._storages)
        self._storages.clear()
        return found

    def stands_for(self, real: Tensor, fake: Tensor) -> None:
        """What was saved of a real tensor, which a unit ran on, is its fake's."""
        if storage_of(real) in self._storages:
            self._storages.add(storage_of(fake))
