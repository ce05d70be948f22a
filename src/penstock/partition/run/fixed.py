"""Objects that a recording holds as constants: sets, arrays, generators, and others that a stage cannot rebuild.

A block gets the same object for every microbatch. That makes no difference unless something changes the object: then
the change would carry over between microbatches, whereas one device makes a new object in each forward.
"""

from __future__ import annotations

import array
import enum
import pickle
import random
from collections.abc import Callable, Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.partition.obstacle import Obstacle
from penstock.partition.values.passed import alike
from penstock.trees import Flat, fields, flatten

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)
_CONTAINERS = (set, bytearray, array.array, np.ndarray)

_GLOBAL = (getattr(random.random, "__self__", None), getattr(np.random.random_sample, "__self__", None))
"""The generators behind `random` and `numpy.random`, which have a stream for each block and microbatch."""


@dataclass(frozen=True, slots=True, eq=False)
class _Given:
    """An object as it was when a block first got it. `here`: on which line, `scope`: in which module's forward."""

    value: Any
    state: object
    unit: str
    here: str
    scope: str

    def is_changed(self) -> bool:
        now = _state(self.value)
        if isinstance(now, Flat) and isinstance(self.state, Flat):
            return not alike((now.structure, now.leaves), (self.state.structure, self.state.leaves))
        return now != self.state

    def refusal(self, what: str) -> Obstacle:
        remedy = "Pass tensors, or a list, a dict or a plain object, which are made anew for each microbatch"
        if isinstance(self.value, _GENERATORS):
            remedy = "Draw from torch, numpy.random or random itself, which have a stream for each microbatch"
        return Obstacle(
            f"{self.here} passes an object of type {type(self.value).__name__} to {self.unit!r}, {what}: each "
            "microbatch would find in it what the one before has left there",
            self.scope,
            otherwise=remedy,
        )


class Fixed:
    """The constants that a forward gave to its blocks.

    Args:
        elsewhere: returns the ids of what the model keeps (for an object, the id of its `__dict__`), changes to which
            other rules cover. Called once.
    """

    def __init__(self, elsewhere: Callable[[], Collection[int]]) -> None:
        self._find_elsewhere = elsewhere
        self._elsewhere: Collection[int] | None = None
        self._given: dict[int, _Given] = {}

    def give(self, values: Iterable[Any], unit: str, here: Callable[[], str], scope: str) -> list[Any]:
        """Call this before a block's call. `values`: its arguments that no stage can rebuild; usually there are none.

        Returns those that the call must not change.

        Raises:
            Obstacle: the forward changed one after giving it to an earlier block.
        """
        found = [value for value in values if self._is_watched(value)]
        if found:
            self.check()
        for value in found:
            self._given.setdefault(id(value), _Given(value, _state(value), unit, here(), scope))
        return found

    def _is_watched(self, value: Any) -> bool:
        attributes = getattr(value, "__dict__", None)
        if isinstance(value, (*_CONTAINERS, *_GENERATORS)):
            if any(value is one for one in _GLOBAL):
                return False
        elif not isinstance(attributes, dict) or isinstance(value, enum.Enum):
            return False
        if self._elsewhere is None:
            self._elsewhere = self._find_elsewhere()
        return id(value) not in self._elsewhere and id(attributes) not in self._elsewhere

    def take(self, values: Iterable[Any], unit: str) -> None:
        """Call this after the call, with what `give` returned. Raises Obstacle if the call changed one of them."""
        for value in values:
            if (given := self._given[id(value)]).is_changed():
                raise given.refusal("which changes it" if unit == given.unit else f"and {unit!r} changes it")

    def check(self) -> None:
        """Raises Obstacle if the forward itself changed one after giving it to a block."""
        for given in self._given.values():
            if given.is_changed():
                raise given.refusal("and changes it afterwards")


def _state(value: Any) -> object:
    """A value that changes whenever the object does, for comparison. Large arrays are not copied."""
    if isinstance(value, set):
        return set(value)
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, hash(value.tobytes())
    if isinstance(value, bytearray):
        return bytes(value)
    if isinstance(value, array.array):
        return value.typecode, value.tobytes()
    if isinstance(value, _GENERATORS):
        return _position(value)
    return flatten(fields(value), empty=True)


def _position(generator: Any) -> Hashable:
    """A generator's position in its stream."""
    if isinstance(generator, random.SystemRandom):  # it has no stream
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.RandomState):
        return pickle.dumps(generator.get_state(legacy=False))
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return pickle.dumps(bits.state)
