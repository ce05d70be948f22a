"""Notices attributes that a stage's forwards, or a loss, set for the first time after the first step: a flag was
switched, a count reached some number, the batch's values require it, or a block was left out by chance until then.

Attributes are read before and after every forward. To keep that cheap, no Python runs per attribute unless something
has changed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain, compress, count
from operator import is_, is_not
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock.partition.state.library import OF_TORCH
from penstock.partition.state.places import MISSING, Attribute, Contents, Key, Place, same_items
from penstock.partition.state.reach import is_of_others
from penstock.partition.values.objects import CONSTANTS

LARGEST = 100
"""Dicts, and objects in attributes, are ignored if they have more entries."""


Reading = tuple[list[int], list[Any], list[Any]]
"""The number of entries of each holder, and the keys and values of all holders, one after another."""


Held = tuple[str, dict[Any, Any], bool]
"""A dict, its name, and whether it holds the attributes of a module or an object."""


class Attributes:
    """The entries of some dicts, most of which hold the attributes of modules and objects."""

    def __init__(self, holders: Iterable[Held]) -> None:
        found = {id(held): (name, held, own) for name, held, own in holders}
        self._names = [(name, own) for name, _, own in found.values()]
        self._holders = [held for _, held, _ in found.values()]
        self._usual: tuple[list[int], list[Any]] = [], []
        self._last: Reading = [], [], []

    def read(self) -> Reading:
        """The current contents; the same object as last time if they are the same."""
        if not self._are(self._last):
            self._last = self._now()
        return self._last

    def set_since(self, before: Reading, known: Collection[Key]) -> Mapping[Key, tuple[Place, Any]]:
        """The places that have changed, apart from known ones, each with its previous contents."""
        if self._are(before):
            return {}
        self._last = [], [], []  # what has been replaced must not stay alive
        lengths, keys, values = self._now()
        changed: list[int] = []
        if lengths == before[0]:
            changed = [*compress(count(), map(is_not, values, before[2]))]
            if changed == self._usual[0] and all(map(is_, keys, self._usual[1])):
                return {}
        owners = {key[0] for key in known}
        new = {
            place.key: (place, was)
            for place, was in self._changes(before)
            if place.key not in known and not (isinstance(place, Contents) and place.key[0] in owners)
        }
        if not new:
            self._usual = changed, keys
        return new

    def _are(self, reading: Reading) -> bool:
        """Whether the contents are still those of a reading."""
        lengths, _, values = reading
        held = self._holders
        return [*map(len, held)] == lengths and all(map(is_, chain.from_iterable(map(dict.values, held)), values))

    def _now(self) -> Reading:
        held = self._holders
        return [*map(len, held)], [*chain.from_iterable(held)], [*chain.from_iterable(map(dict.values, held))]

    def _changes(self, before: Reading) -> Iterator[tuple[Place, Any]]:
        start = 0
        for (name, own), holder, length in zip(self._names, self._holders, before[0], strict=True):
            part = slice(start, start := start + length)
            was = dict(zip(before[1][part], before[2][part], strict=True))
            if not own:
                if not same_items(holder, was):
                    yield Contents(holder, name), was
                continue
            for key in {**was, **holder}:
                if key not in OF_TORCH and was.get(key, MISSING) is not holder.get(key, MISSING):
                    yield Attribute(holder, key), was.get(key, MISSING)


def holders(owner: Any) -> Iterator[Held]:
    """The attributes of a module or an object, those of objects in them, and the dicts in them.

    Nothing for a module of torch's own classes, which sets nothing.
    """
    own = getattr(owner, "__dict__", None)
    if not isinstance(own, dict) or is_of_others(type(owner).__module__):
        return
    yield "", own, True
    for name, value in own.items():
        if name in OF_TORCH or type(value) in CONSTANTS:
            continue
        if isinstance(value, dict) and len(value) <= LARGEST:
            yield name, value, False
        elif not isinstance(value, (Tensor, nn.Module, type, ModuleType, FunctionType, MethodType)):
            inside = getattr(value, "__dict__", None)
            if isinstance(inside, dict) and len(inside) <= LARGEST and not is_of_others(type(value).__module__):
                yield name, inside, True
