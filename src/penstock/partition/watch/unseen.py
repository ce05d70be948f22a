"""Finds in-place updates of values between calls that backward needs.

Autograd counts a tensor's versions, and raises if backward finds a different version from the one that forward saved,
unless the update went through `.data`. One device then computes with whatever was written; a stage that holds another
copy would not. So this module finds such updates, and what forward saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node

from penstock.compat import packed_by, size_of, storage_of
from penstock.errors import PartitionError
from penstock.partition.recording.facts import Fact
from penstock.partition.recording.recording import Recording


class UnwatchableError(PartitionError):
    """What is saved for backward cannot be seen: the forward uses something that torch's hooks do not work with."""


class Watch(BaseException):
    """The forward updates in place what backward may need: record it again, and look at what is saved.

    Not an Exception, so that the model's own `except` clauses do not catch it.
    """


def overwrites_unseen(recording: Recording) -> bool:
    """Whether the forward updates, unseen by autograd, values between calls, which may be saved for backward."""
    return any(fact.unseen.difference(recording.memory) for fact in recording.facts.values())


class Versions:
    """How often each tensor had been updated, as far as autograd knows, when last asked."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._known = {id(tensor): _version(tensor) for tensor in tensors}

    def add(self, tensor: Tensor) -> None:
        self._known[id(tensor)] = _version(tensor)

    def has_new(self, tensor: Tensor) -> bool:
        """Whether autograd knows of an update since last asked."""
        before, self._known[id(tensor)] = self._known[id(tensor)], _version(tensor)
        return before != self._known[id(tensor)]


def _version(tensor: Tensor) -> int:
    """How often it was updated in place; 0 in inference mode, which does not count and saves nothing for backward."""
    return 0 if tensor.is_inference() else tensor._version


class Saved:
    """What the forward saves for backward, call by call.

    Only what the graph of the results leads to counts: distances to a codebook, which require no gradient, do not.

    Args:
        meant: returns the memory that a tensor stands for, if that is not its own.
        is_watched: whether anything is collected at all.
    """

    def __init__(self, meant: Callable[[Tensor], int], *, is_watched: bool) -> None:
        self._meant, self.is_watched = meant, is_watched
        self._recent: list[_Packed] = []  # since the last call was written
        self._of_calls: list[tuple[Fact, list[_Packed]]] = []
        self._visited: set[Node] = set()
        self._is_blind = False  # whether some nodes do not say what they save
        self._keeps_given = False  # whether foreign hooks keep the latest call's arguments

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
                "the forward updates tensors in place that backward may need, and Penstock cannot see whether it needs "
                f"them, since the forward uses something that hides it ({error}). Make the update out of place"
            ) from error

    def _pack(self, tensor: Tensor) -> _Packed:
        storage = storage_of(tensor)
        self._recent.append(_Packed(tensor, {storage, self._meant(tensor)}, storage, size_of(tensor)))
        return self._recent[-1]

    @contextmanager
    def aside(self) -> Iterator[None]:
        """A context in which what is saved is forgotten again."""
        recent, visited = self._recent, set(self._visited)
        is_blind, keeps_given = self._is_blind, self._keeps_given
        self._recent = []
        try:
            yield
        finally:
            _release(self._recent)
            self._recent, self._visited = recent, visited
            self._is_blind, self._keeps_given = is_blind, keeps_given

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
                elif one is not None:  # packed by other hooks, such as a checkpoint's, which keep the call's arguments
                    self._keeps_given = True

    def stands_for(self, real: Tensor, fake: int) -> None:
        """Notes that what was saved of a real tensor that a unit ran on counts as its fake's.

        This holds even if the real tensor's memory was replaced. `fake`: the number of the fake's memory.
        """
        for packed in self._recent:
            if storage_of(real) in packed.memory or packed.tensor is real:
                packed.memory.add(fake)
                packed.key = fake

    def belongs_to(self, fact: Fact, given: Iterable[Tensor]) -> None:
        """Attributes what was saved since the last call to this one. `given`: its arguments."""
        if self._keeps_given or fact.runs_again:
            fact.saved = frozenset(map(storage_of, given))
        if self._recent:
            self._of_calls.append((fact, self._recent))
        self._recent, self._keeps_given = [], False

    def settle(self) -> None:
        """Call this once the forward has ended: writes into the facts what their calls saved."""
        for fact, packed in self._of_calls:
            used = [each for each in packed if each.is_used or self._is_blind]
            fact.saved = fact.saved.union(*(each.memory for each in used))
            fact.saved_sizes = {each.key: each.size for each in used}


@dataclass(slots=True)
class _Packed:
    """One saved tensor.

    Attributes:
        memory: all the numbers by which its memory is known.
        key: one of them, the same for all tensors in that memory.
        size: the bytes of that memory.
        is_used: whether a node of a result's graph holds it.
    """

    tensor: Tensor | None
    memory: set[int]
    key: int
    size: int
    is_used: bool = False


def _unpack(packed: _Packed) -> Tensor:
    assert packed.tensor is not None, "the recording is over"
    return packed.tensor


def _release(every: Iterable[_Packed]) -> None:
    for packed in every:
        packed.tensor = None
