"""What a forward that is recorded call by call finds when it begins, besides its inputs.

A recording takes it as given: attributes and what plain objects hold, class attributes, numbers in globals and
closures, hooks, the modules inside. Where any of it changes between two steps (an annealed temperature, a block that
was swapped) the model is recorded again. What the steps themselves change (a counter that a block keeps in a shared
object) stands for what it was: units run as they are, and see it.
"""

from __future__ import annotations

import enum
import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from inspect import getattr_static
from itertools import count
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device, slice, range)
DEPTH = 4
"""How deep objects in objects are looked into."""
LENGTH = 64
"""Longer containers are known by identity and length alone."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_modules")
OF_TORCH = frozenset(vars(nn.Module()))

Found = dict[tuple[str, ...], Hashable]
Attributes = tuple[tuple[tuple[str, ...], Hashable], ...]


@dataclass
class Given:
    """Reads what recordings take as given.

    Attributes:
        opened: the modules whose forward is recorded call by call, by name.
        chances: see `chances_of`.
    """

    opened: Mapping[str, nn.Module] = field(default_factory=dict)
    chances: Collection[tuple[str, nn.Module, str]] = ()
    _own: Found = field(default_factory=dict)  # what steps change -> what it was
    _numbers: dict[int, tuple[weakref.ref[Any], int]] = field(default_factory=dict)
    _count: Iterator[int] = field(default_factory=count)

    def read(self) -> Attributes:
        """All of it, as one hashable value."""
        found = self._read()
        found.update((path, value) for path, value in self._own.items() if path in found)
        return tuple(found.items())

    def settle(self, before: Attributes) -> None:
        """To be called behind a step, with what `read` returned before it."""
        after = self._read()
        for path, value in before:
            if path not in self._own and after.get(path, value) != value:
                self._own[path] = value

    def _read(self) -> Found:
        found: Found = {}
        for name, module in self.opened.items():
            for attribute, value in vars(module).items():
                if attribute in HOOKS:
                    numbers = tuple(self._number(v) for v in value.values() if not _is_ours(v))
                    if numbers:
                        found[name, attribute] = numbers
                elif attribute not in OF_TORCH:
                    _look(found, (name, attribute), value, self._number, DEPTH, set())
            self._read_code(found, name, module)
        for name, module, attribute in self.chances:
            value = getattr(module, attribute, None)
            found[name, attribute, "draws"] = bool(value) if isinstance(value, PLAIN) else True
        return found

    def _read_code(self, found: Found, name: str, module: nn.Module) -> None:
        """What the class holds, and what the forward's code names: globals, closures, attributes of inner modules."""
        for cls in type(module).__mro__:
            if cls.__module__.partition(".")[0] == "torch":
                break
            for attribute, value in vars(cls).items():
                if not attribute.startswith("__") and isinstance(value, PLAIN):
                    found[name, cls.__qualname__, attribute] = type(value), _hashable(value)
        forward = getattr_static(type(module), "forward", None)  # TorchScript's cannot be had from its class
        forward = getattr(forward, "__wrapped__", forward)
        found[name, "class", "forward"] = self._number(forward)
        if not isinstance(forward, FunctionType) or forward.__module__.partition(".")[0] == "torch":
            return
        for word in _words(forward.__code__):
            if isinstance(value := forward.__globals__.get(word), PLAIN) and value is not None:
                found[name, "global", word] = type(value), _hashable(value)
        for word, value in _closure(forward):
            if isinstance(value, PLAIN):
                found[name, "closure", word] = type(value), _hashable(value)
        words = _words(forward.__code__)
        for inner, child in _inside(module):
            for word in words & vars(child).keys():
                if isinstance(vars(child)[word], PLAIN) and word not in OF_TORCH:
                    found[name, inner, word] = type(vars(child)[word]), _hashable(vars(child)[word])

    def _number(self, value: Any) -> int:
        """A number of its own for each object, also where one takes the place in memory of another that is gone."""
        known = self._numbers.get(id(value))
        if known is not None and known[0]() is value:
            return known[1]
        try:
            reference = weakref.ref(value)
        except TypeError:
            return -id(value)
        number = next(self._count)
        self._numbers[id(value)] = reference, number
        return number


def contents_of(value: object) -> Hashable:
    """What a plain object among the inputs holds now; None for a plain value, which says so itself."""
    if isinstance(value, PLAIN):
        return None
    found: Found = {}
    _look(found, (), value, id, DEPTH, set())
    return tuple(found.items())


def opened_by_name(model: nn.Module, opened: Collection[nn.Module]) -> dict[str, nn.Module]:
    """By name: those modules, in the model's order."""
    wanted = {id(module) for module in opened}
    return {name: module for name, module in model.named_modules() if id(module) in wanted}


def chances_of(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """The attributes by whose name a module drops something by chance: at a rate of 0 a recording sees no draw. And
    numbers of other names that are 0, in a module or its class: they may switch off what draws as well."""
    return [
        (name, module, attribute)
        for name, module in model.named_modules()
        for attribute, value in (_of_class(type(module)) | vars(module)).items()
        if isinstance(value, (int, float)) and attribute not in OF_TORCH
        if attribute == "p" or "drop" in attribute or (type(value) in (int, float) and not value)
    ]


def _of_class(kind: type) -> dict[str, object]:
    """What a module's own classes hold, without those of torch."""
    own = [cls for cls in reversed(kind.__mro__) if cls.__module__.partition(".")[0] not in ("torch", "builtins")]
    return {name: value for cls in own for name, value in vars(cls).items() if not name.startswith("__")}


def _look(
    found: Found, path: tuple[str, ...], value: Any, number: Callable[[Any], int], depth: int, above: set[int]
) -> None:
    kind = type(value)
    if isinstance(value, PLAIN):
        found[path] = kind, _hashable(value)
    elif kind.__module__ == "numpy" and getattr(value, "shape", None) == ():
        found[path] = kind, value.item()
    elif depth and id(value) not in above and (parts := _parts(value)) is not None:
        found[path] = kind, len(parts)
        for key, part in parts:
            _look(found, (*path, key), part, number, depth - 1, {*above, id(value)})
    else:
        found[path] = kind, number(value)


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """What is inside of a container or a plain object; None for anything else."""
    if type(value) in (list, tuple, deque) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return [(str(i), part) for i, part in enumerate(value)] if len(value) <= LENGTH else None
    if type(value) in (dict, OrderedDict):
        return [(repr(key) if isinstance(key, PLAIN) else str(type(key)), part) for key, part in value.items()][:LENGTH]
    package = type(value).__module__.partition(".")[0]
    if isinstance(value, (Tensor, nn.Module, type, FunctionType)) or package in ("torch", "_thread", "_io"):
        return None
    held = getattr(value, "__dict__", None)
    return [(str(key), part) for key, part in held.items()] if isinstance(held, dict) else None


def _is_ours(hook: Any) -> bool:
    return str(getattr(hook, "__module__", "")).startswith("penstock.")


def _hashable(value: Any) -> Hashable:
    return repr(value) if isinstance(value, slice) else value


def _closure(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for word, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield word, cell.cell_contents
        except ValueError:  # not set yet
            continue


@functools.cache
def _words(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes in a function's code."""
    inner = [_words(c) for c in code.co_consts if isinstance(c, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _inside(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules inside, through lists of modules."""
    for name, child in module.named_children():
        yield name, child
        if isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield from ((f"{name}.{inner}", grandchild) for inner, grandchild in child.named_children())
