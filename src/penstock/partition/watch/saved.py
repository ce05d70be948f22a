"""Finds what a forward saves for backward, call by call: the bytes that memory limits count."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from penstock.compat import packed_by, size_of, storage_of
from penstock.errors import PartitionError
from penstock.partition.recording.facts import Fact


class UnwatchableError(PartitionError):
    """What is saved for backward cannot be seen: the forward uses something that torch's hooks do not work with."""


class Saved:
    """What the forward saves for backward, call by call.

    Only what the graph of the results leads to counts: distances to a codebook, which require no gradient, do not.

    Args:
        is_watched: whether anything is collected at all.
    """

    def __init__(self, *, is_watched: bool) -> None:
        self.is_watched = is_watched
        self._recent: list[_Packed] = []  # since the last call was written
        self._of_calls: list[tuple[Fact, list[_Packed]]] = []
        self._visited: set[Node] = set()
        self._is_blind = False  # whether some nodes do not say what they save

    @contextmanager
    def watching(self) -> Iterator[None]:
        if not self.is_watched:
            yield
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                yield
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):
                raise
            raise UnwatchableError(
                f"what the forward saves for backward cannot be seen, since it uses something that hides it ({error}). "
                "Omit what needs it: a memory limit, balance='memory'"
            ) from error

    def _pack(self, tensor: Tensor) -> _Packed:
        self._recent.append(_Packed(tensor, storage_of(tensor), size_of(tensor)))
        return self._recent[-1]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which what is saved is forgotten again."""
        recent, visited = self._recent, set(self._visited)
        is_blind = self._is_blind
        self._recent = []
        try:
            yield
        finally:
            _release(self._recent)
            self._recent, self._visited = recent, visited
            self._is_blind = is_blind

    def release(self) -> None:
        """Call this at the end: a node that saves its own result, and that result, keep each other alive."""
        _release(self._recent)
        for _, packed in self._of_calls:
            _release(packed)

    def forget(self) -> None:
        """Forgets what was saved since the last call: it belongs to no call."""
        _release(self._recent)
        self._recent = []

    def follow(self, results: Iterable[Tensor]) -> None:
        """Notes what the backward of these results will use."""
        if not self.is_watched:
            return
        pending = [t.grad_fn for t in results if t.grad_fn is not None]
        while pending:
            node = pending.pop()
            if node in self._visited:
                continue
            self._visited.add(node)
            pending += [following for following, _ in node.next_functions if following is not None]
            packed = packed_by(node)
            self._is_blind |= packed is None
            for one in packed or ():
                if isinstance(one, _Packed):
                    one.is_used = True

    def stands_for(self, real: Tensor, fake: int) -> None:
        """Notes that what was saved of a real tensor that a unit ran on counts as its fake's.

        This holds even if the real tensor's memory was replaced. `fake`: the number of the fake's memory.
        """
        for packed in self._recent:
            if storage_of(real) == packed.memory or packed.tensor is real:
                packed.memory = fake

    def belongs_to(self, fact: Fact) -> None:
        """Attributes what was saved since the last call to this one."""
        if self._recent:
            self._of_calls.append((fact, self._recent))
        self._recent = []

    def settle(self) -> None:
        """Call this once the forward has ended: writes into the facts what their calls saved."""
        for fact, packed in self._of_calls:
            used = [each for each in packed if each.is_used or self._is_blind]
            fact.saved_sizes = {each.memory: each.size for each in used}


@dataclass(slots=True)
class _Packed:
    """One saved tensor.

    Attributes:
        memory: the number of its memory.
        size: the bytes of that memory.
        is_used: whether a node of a result's graph holds it.
    """

    tensor: Tensor | None
    memory: int
    size: int
    is_used: bool = False


def _unpack(packed: _Packed) -> Tensor:
    assert packed.tensor is not None, "the recording is over"
    return packed.tensor


def _release(every: Iterable[_Packed]) -> None:
    for packed in every:
        packed.tensor = None
