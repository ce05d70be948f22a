"""What a forward that is recorded call by call finds when it begins, besides its inputs.

A recording takes this as given: attributes and the contents of plain objects (a configuration, an annealed
temperature), attributes of classes, hooks, submodules. If any of it changes between two steps, the model is recorded
again. What a step itself changes (a counter that a block keeps in a shared object) does not count: units run the
model's own code, and see it.

Globals, closures and default arguments are not read.
"""

from __future__ import annotations

import enum
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cache
from inspect import getattr_static
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock._base.pytree import fields
from penstock.partition.state.reachable import DEPTH
from penstock.partition.user_code import TORCH_ATTRIBUTES, iter_functions, package_name

COMPARABLE = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, slice, range)
LENGTH = 64
"""Longer containers are compared by identity only."""
LARGEST_ARRAY = 2**16
"""Arrays with more bytes, too."""
CLOSED = (Tensor, nn.Module, ModuleType, type, FunctionType)
"""Types of objects that are compared by identity."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
NEW = object()
"""Stands for something that was not there before a step."""

Values = dict[tuple[str, ...], Hashable]
Attributes = tuple[tuple[tuple[str, ...], Hashable], ...]


@dataclass
class Assumptions:
    """Reads what recordings take as given.

    Attributes:
        opened: the modules whose forward is recorded call by call, by name.
        units: the units that they call, by name.
        words: the names in the code of the opened modules: it may read attributes of units that are called so.
        chances: see `find_drop_rates`.
    """

    opened: Mapping[str, nn.Module] = field(default_factory=dict)
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    words: frozenset[str] = frozenset()
    chances: Collection[tuple[str, nn.Module, str]] = ()
    _values_before: Values = field(default_factory=dict)  # values that steps change, as they were before

    def find_modules(self, model: nn.Module, units: Collection[nn.Module]) -> None:
        """Find the modules whose forward is recorded call by call: those that are neither a unit nor part of one."""
        self.opened = dict(model.named_modules(memo={*units}))
        self.units = {name: module for name, module in model.named_modules() if module in units}
        self.words = frozenset[str]().union(*map(names_in_code, {type(module) for module in self.opened.values()}))
        self.chances = find_drop_rates(model)

    def read(self) -> Attributes:
        """Return everything that a recording takes as given, as one hashable value."""
        readings = self._read()
        readings.update((path, value) for path, value in self._values_before.items() if path in readings)
        return tuple((path, value) for path, value in readings.items() if value is not NEW)

    def settle(self, before: Attributes) -> None:
        """Call this after a step, with what `read` returned before it."""
        after = self._read()
        for path, value in before:
            if path not in self._values_before and after.get(path, value) != value:
                self._values_before[path] = value
        for path in after.keys() - {path for path, _ in before}:
            self._values_before.setdefault(path, NEW)

    def _read(self) -> Values:
        readings: Values = {}
        for name, module in self.opened.items():
            for attribute, value in vars(module).items():
                if attribute in HOOKS:
                    numbers = tuple(None if v is None else _Same(v) for v in value.values() if not _is_penstocks(v))
                    if numbers:
                        readings[name, attribute] = numbers
                elif attribute not in TORCH_ATTRIBUTES:
                    _read_value(readings, (name, attribute), value, _Same, DEPTH, set())
            self._read_classes(readings, name, module)
        for name, module in self.units.items():
            for attribute, value in vars(module).items():
                if attribute in self.words and isinstance(value, COMPARABLE) and attribute not in TORCH_ATTRIBUTES:
                    readings[name, attribute] = type(value), _hashable(value)
        for name, module, attribute in self.chances:
            value = getattr(module, attribute, None)
            readings[name, attribute, "draws"] = bool(value) if isinstance(value, COMPARABLE) else True
        return readings

    def _read_classes(self, readings: Values, name: str, module: nn.Module) -> None:
        for cls in type(module).__mro__:
            if package_name(cls.__module__) == "torch":
                break
            for attribute, value in vars(cls).items():
                if not attribute.startswith("__") and isinstance(value, COMPARABLE):
                    readings[name, cls.__qualname__, attribute] = type(value), _hashable(value)
        forward = getattr_static(type(module), "forward", None)  # TorchScript's cannot be read from its class
        readings[name, "class", "forward"] = _Same(forward)


class _Same:
    """An object, equal to itself alone: not to one that takes its address once it is gone."""

    __slots__ = ("_hash", "_reference")

    def __init__(self, value: Any) -> None:
        self._hash = id(value)
        self._reference: Callable[[], Any]
        try:
            self._reference = weakref.ref(value)
        except TypeError:  # it stays alive instead
            self._reference = lambda: value

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and self._hash == other._hash
            and self._reference() is other._reference() is not None
        )

    def __hash__(self) -> int:
        return self._hash


def read_contents(value: object) -> Hashable:
    """Return the present contents of a plain object among the inputs; None for a plain value, which needs no
    description."""
    if isinstance(value, COMPARABLE):
        return None
    readings: Values = {}
    _read_value(readings, (), value, id, DEPTH, set())
    return tuple(readings.items())


def find_drop_rates(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Return the attributes whose names suggest a chance of dropping something: at a rate of 0 a recording sees no
    draw.

    Also numbers with other names that are 0, in a module or its class: they too may switch off something that draws.
    """
    return [
        (name, module, attribute)
        for name, module in model.named_modules()
        for attribute, value in (_members(type(module)) | vars(module)).items()
        if isinstance(value, (int, float)) and attribute not in TORCH_ATTRIBUTES
        if attribute == "p" or "drop" in attribute or (type(value) in (int, float) and not value)
    ]


def _members(kind: type) -> dict[str, object]:
    """Return the attributes of a module's classes, without torch's."""
    classes = [cls for cls in reversed(kind.__mro__) if package_name(cls.__module__) not in ("torch", "builtins")]
    return {name: value for cls in classes for name, value in vars(cls).items() if not name.startswith("__")}


def names_in_code(kind: type) -> frozenset[str]:
    """Return the names and texts (of `getattr`) in the code of a class and its bases, without torch's."""
    return frozenset[str]().union(*(_words(f.__code__) for v in _members(kind).values() for f in iter_functions(v)))


@cache
def _words(code: CodeType) -> frozenset[str]:
    inner = [_words(part) for part in code.co_consts if isinstance(part, CodeType)]
    return frozenset(code.co_names).union(filter(lambda part: isinstance(part, str), code.co_consts), *inner)


def _read_value(
    values: Values, path: tuple[str, ...], value: Any, ident: Callable[[Any], Hashable], depth: int, outer: set[int]
) -> None:
    kind = type(value)
    if isinstance(value, COMPARABLE):
        values[path] = kind, _hashable(value)
    elif isinstance(value, (np.generic, np.ndarray)) and value.nbytes <= LARGEST_ARRAY:
        values[path] = kind, value.dtype.str, value.shape, value.tobytes()
    elif isinstance(value, (set, frozenset)) and len(value) <= LENGTH:
        values[path] = kind, frozenset(_hashable(i) if isinstance(i, COMPARABLE) else ident(i) for i in value)
    elif depth and id(value) not in outer and (parts := _parts(value)) is not None:
        values[path] = kind, len(parts)
        for key, part in parts.items():
            _read_value(values, (*path, key), part, ident, depth - 1, {*outer, id(value)})
    else:
        values[path] = kind, ident(value)


def _parts(value: Any) -> dict[str, Any] | None:
    """Return the contents of a list, tuple, dict or object; None for what shows none, and for what has too many."""
    parts: dict[str, Any] = {}
    if isinstance(value, (list, tuple, deque)):
        parts = {str(index): part for index, part in enumerate(value)}
    elif isinstance(value, dict):
        parts = {repr(key) if isinstance(key, COMPARABLE) else str(type(key)): part for key, part in value.items()}
    elif isinstance(value, MethodType):
        parts = {"self": value.__self__, "function": value.__func__}
    elif isinstance(value, CLOSED) or package_name(type(value).__module__) in ("torch", "_thread", "_io"):
        return None
    if len(parts) > LENGTH:
        return None
    parts |= fields(value)  # a partial's, too
    return parts if parts or isinstance(value, (list, tuple, deque, dict)) else None


def _is_penstocks(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("penstock.")


def _hashable(value: Any) -> Hashable:
    """Convert a plain value to one that is equal only to itself: 0.0 and -0.0 differ."""
    return repr(value) if isinstance(value, (slice, complex)) or (isinstance(value, float) and not value) else value
