"""Where tensors come from: which recorded call made each, and which calls read what they were not given.

A stage replays a call with its arguments. A tensor that reaches the call in any other way (an attribute, a closure, a
list that other code fills, a module among the constants) is missing in the replay, or belongs to another microbatch.
Python does not show such ways, but the operators below torch's functions receive their tensors however they came.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

from penstock._base.compat import WeakStorage, size_of, storage_of, unset_fake_temporarily
from penstock.partition.source import is_ours


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call while it runs.

    Attributes:
        number: its node's number.
        scope: the name of the module that it is in; for a unit, the unit's own name.
        unit: whether it is a unit.
        given: the memory of its arguments, and of what its own module holds.
    """

    number: int
    scope: str
    unit: bool
    given: frozenset[int]


@dataclass(frozen=True, slots=True)
class Made:
    """What made a tensor: a call (None for the model's inputs, and for code between the calls), and on which line."""

    call: Call | None
    code: CodeType | None
    line: int

    @property
    def unit(self) -> str:
        """The unit that made it; empty if it was made outside all units."""
        return self.call.scope if self.call is not None and self.call.unit else ""

    def __str__(self) -> str:
        return _place("" if self.call is None else self.call.scope, self.code, self.line)


@dataclass(frozen=True, slots=True)
class Foreign:
    """A call read a tensor that it was not given: the parameter or buffer `held`, or one that `made` made."""

    reader: Call
    storage: int
    shape: tuple[int, ...]
    held: str | None
    made: Made | None
    code: CodeType | None
    line: int

    @property
    def at(self) -> str:
        return _place(self.reader.scope, self.code, self.line)


@dataclass
class Provenance:
    """Hears about every operator from the observer, and about every recorded call from the recorder.

    Attributes:
        held: the name of each parameter and buffer, by its memory.
        touched: the names of those that any operator took.
        numbers: the numbers of everything made, so that none is used twice.
        foreign: what was read besides arguments, once for each call and memory.
        own: the memory of the real parameters and buffers, for which those in `held` stand in.
        looked_at: the memory whose contents were taken before anything overwrote them.
    """

    held: Mapping[int, str] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)
    own: frozenset[int] = frozenset()
    foreign: dict[tuple[int, int], Foreign] = field(default_factory=dict)
    _made: dict[int, Made] = field(default_factory=dict)
    _writers: dict[int, Made] = field(default_factory=dict)  # of what is older than the forward
    _same: dict[int, int] = field(default_factory=dict)
    numbers: list[WeakStorage] = field(default_factory=list)
    _fixed: set[int] = field(default_factory=set)
    _steady: set[int] = field(default_factory=set)
    _before: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    looked_at: set[int] = field(default_factory=set)
    _overwritten: set[int] = field(default_factory=set)
    _call: Call | None = None

    @property
    def place(self) -> tuple[str, str]:
        """The running unit and the running module; empty if there is none."""
        call = self._call
        return ("", "") if call is None else (call.scope if call.unit else "", call.scope)

    def root(self, tensor: Tensor) -> int:
        """The number of a tensor's memory; for a fake that stands in for a real tensor, the real one's."""
        number = storage_of(tensor)
        return self._same.get(number, number)

    def roots(self, tensors: Iterable[Tensor]) -> frozenset[int]:
        return frozenset(map(self.root, tensors))

    def add_input(self, tensor: Tensor) -> None:
        """Notes a tensor that enters the model."""
        self._made[storage_of(tensor)] = Made(None, None, 0)

    def stands_in(self, fake: Tensor, real: Tensor) -> None:
        """Notes that the mode uses `fake` wherever `real` is meant."""
        self._alias(fake, self.root(real))

    def exchanged(self, tensor: Tensor, root: int) -> None:
        """Notes that a tensor whose memory had the number `root` now has other memory."""
        self._made.pop(storage_of(tensor), None)
        self._alias(tensor, root)

    def maker(self, tensor: Tensor) -> Made | None:
        """What made a tensor during this forward, or was the first to write to an older one; None for others."""
        root = self.root(tensor)
        return self._made.get(root) or self._writers.get(root)

    def is_fixed(self, tensor: Tensor) -> bool:
        """Whether a tensor was made from numbers in the program alone, and so is the same in every forward."""
        return self.root(tensor) in self._fixed

    def is_steady(self, root: int) -> bool:
        """Whether every forward makes the contents of this memory alike: from numbers in the program, from what the
        model holds, or from tensors' shapes.
        """
        return root in self._fixed or root in self._steady

    @contextmanager
    def calling(self, call: Call) -> Iterator[None]:
        """A context for a recorded call."""
        before, self._call = self._call, call
        try:
            yield
        finally:
            self._call = before

    def forget(self, call: Call) -> None:
        """Drops what was read by a call that was only tried."""
        self.foreign = {key: foreign for key, foreign in self.foreign.items() if foreign.reader is not call}

    def read(self, tensors: Collection[Tensor]) -> list[int]:
        """Notes the tensors that an operator takes, and returns their memory."""
        call, roots = self._call, []
        for tensor in tensors:
            root = self.root(tensor)
            roots.append(root)
            name = self.held.get(root)
            if name is not None:
                self.touched.add(name)
            made = self._made.get(root)
            if call is None or root in call.given:
                continue
            if (made is None and name is None) or (made is not None and made.call is call):
                continue
            if (call.number, root) not in self.foreign:
                where = _user_line()
                self.foreign[call.number, root] = Foreign(call, root, tuple(tensor.shape), name, made, *where)
        return roots

    def looks_at(self, tensors: Iterable[Tensor], overwritten: Iterable[Tensor]) -> None:
        """Notes whose contents an operator takes that nothing has overwritten as a whole since `forget_contents`."""
        self._overwritten |= self.roots(t for t in overwritten if t.numel() * t.itemsize == size_of(t))
        self.looked_at |= self.roots(tensors) - self._overwritten

    def forget_contents(self) -> None:
        """Begins to note anew whose contents are taken."""
        self.looked_at, self._overwritten = set(), set()

    def writing(self, tensor: Tensor) -> None:
        """Call this before an operator updates a tensor in place: keeps what an older one than the forward held."""
        root = self.root(tensor)
        is_older = root not in self._made and root not in self.held and root not in self.own
        if is_older and root not in self._writers and not (self._call is not None and self._call.number < 0):
            self._writers[root] = Made(self._call, *_user_line())
            self.numbers.append(WeakStorage(tensor))
        if is_older and root == storage_of(tensor) and root not in self._before:  # a unit that runs for real changes it
            memory = tensor.untyped_storage()
            with unset_fake_temporarily():
                self._before[root] = memory, memory.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> None:
        """Undoes what the forward wrote to tensors that existed before."""
        for memory, copy in self._before.values():
            memory.copy_(copy)

    def wrote(self, operator: Any, roots: list[int], results: Iterable[Tensor]) -> None:
        """Notes what an operator that took `roots` returned."""
        seeded = is_seeded(operator)
        fixed = not seeded and self._fixed.issuperset(roots)
        steady = not seeded and (_takes_shapes(operator) or all(map(self._is_steady_source, roots)))
        for tensor in results:
            root = self.root(tensor)
            (self._fixed.add if fixed else self._fixed.discard)(root)
            (self._steady.add if steady else self._steady.discard)(root)
            if root in roots:
                continue
            if (roots and _returns_alias(operator)) or self._is_cached_cast(operator, roots):
                self._alias(tensor, roots[0])
                continue
            unit = self._call is not None and self._call.unit
            number = storage_of(tensor)
            self._same.pop(number, None)
            self._made[number] = Made(self._call, *(_user_line() if unit else (None, 0)))
            self.numbers.append(WeakStorage(tensor))

    def _is_steady_source(self, root: int) -> bool:
        return self.is_steady(root) or root in self.held or root in self.own

    def _alias(self, tensor: Tensor, root: int) -> None:
        number = storage_of(tensor)
        if number != root:
            self._same[number] = root
            self.numbers.append(WeakStorage(tensor))

    def _is_cached_cast(self, operator: Any, roots: list[int]) -> bool:
        """Whether this is autocast's half-precision copy of a parameter, which it keeps for the next use."""
        cast = operator is torch.ops.aten._to_copy.default and torch.is_autocast_cache_enabled()
        return cast and bool(roots) and roots[0] in self.held


def tensors_of(values: Iterable[Any]) -> list[Tensor]:
    """The tensors among an operator's arguments or results."""
    found = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [item for item in value if isinstance(item, Tensor)]
    return found


SHAPES = frozenset("zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty".split())  # noqa: SIM905
"""Operators that use only the shape and kind of their first argument."""


@cache
def is_seeded(operator: Any) -> bool:
    """Whether an operator draws random numbers, unless its arguments say otherwise."""
    return torch.Tag.nondeterministic_seeded in getattr(operator, "tags", ())  # flex_attention's has none


OVERWRITES = ("copy_", "zero_", "fill_")
"""Operators that write all of their first argument, and take nothing of what was there."""


@cache
def _takes_shapes(operator: Any) -> bool:
    return isinstance(operator, torch._ops.OpOverload) and operator._opname in SHAPES


def is_view(operator: Any) -> bool:
    """Whether an operator returns another view of its argument, and takes nothing of its contents."""
    return _returns_alias(operator) and not operator._schema.is_mutable


@cache
def _returns_alias(operator: Any) -> bool:
    """Whether an operator returns another view of its first argument. (Lifting a new constant does not count.)"""
    if not isinstance(operator, torch._ops.OpOverload) or operator is torch.ops.aten.lift_fresh.default:
        return False
    return any(r.alias_info is not None for r in operator._schema.returns)


def _user_line() -> tuple[CodeType | None, int]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if not is_ours(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None, 0


def _place(scope: str, code: CodeType | None, line: int) -> str:
    module = f"module {scope!r}" if scope else "the model's own forward"
    return module if code is None else f"{module} ({code.co_filename}:{line})"
