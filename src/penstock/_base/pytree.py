"""Flattens and rebuilds nested values: tuples, lists, dicts, types registered with torch's pytrees, and plain objects.

An object (a dataclass, a `SimpleNamespace`, a subclass of dict) is opened only if it holds a tensor. It is rebuilt
without calling `__init__`: a new object of its class with the same fields. Shared references stay shared in the copy,
and cycles stay cycles. C objects, which do not reveal what they hold, are leaves.
"""

from __future__ import annotations

import enum
import functools
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from penstock._base.compat import open_value

PLAIN = frozenset(
    {
        *(type(None), bool, int, float, complex, str, bytes, type(...), type, range, slice),
        *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.Generator),
        *(types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType),
    }
)
"""Types whose values are never opened."""

DEPTH, BUDGET = 24, 20_000
"""How deep to look into objects, and how many values to look at in all; anything beyond that becomes a leaf."""

HEAP_TYPE = 1 << 9
"""CPython's type flag for a class that is not built in."""

BASES = (object, types.SimpleNamespace, tuple, list, dict, OrderedDict)
"""The built-ins that a class may derive from. Their own methods are called, even if the class overrides them."""


IsLeaf = Callable[[Any, str], bool]


class Leaf:
    """A base class for objects that stay closed even if they hold tensors."""

    __slots__ = ()


class Flat(NamedTuple):
    """A flattened value: `leaves[i]` is at `paths[i]`, written as in Python; `structure` is all but the leaves."""

    leaves: list[Any]
    paths: list[str]
    structure: Hashable


class Rebuild(NamedTuple):
    """`function(children, context)` rebuilds a node. Two are equal if their type and context are."""

    kind: type
    context: Any
    function: Callable[[Sequence[Any], Any], Any]

    def __hash__(self) -> int:
        return hash(self.kind)  # a context need not be hashable

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Rebuild) or self.kind is not other.kind:
            return False
        return self.context is other.context or bool(self.context == other.context)

    def __ne__(self, other: object) -> bool:
        return not self == other


class TreeSpec(NamedTuple):
    """The structure of a value. `op` says what kind it is; `context` and `children` depend on that."""

    op: str
    context: Any
    children: tuple[TreeSpec, ...] = ()


LEAF = TreeSpec("leaf", None)
NOTHING = TreeSpec("tuple", None)


def flatten(value: Any, *, empty: bool = False, closed: Container[int] = (), is_leaf: IsLeaf | None = None) -> Flat:
    """Flatten a value. `empty`: also open objects that hold no tensor, except those whose id is in `closed`. `is_leaf`:
    whether a container, given with its path, stays closed; it then counts as a tensor."""
    walk = _Walk(empty, closed, is_leaf)
    structure = walk.visit(value, "", 0)
    return Flat(walk.leaves, walk.paths, structure)


def unflatten(leaves: Sequence[Any], structure: Any) -> Any:
    """Rebuild a value from its leaves and its structure."""
    if structure is LEAF:
        return leaves[0]
    return _build(structure, iter(leaves), [])


def leaf_tensors(tree: Any) -> list[Tensor]:
    """Return the tensors among a tree's leaves."""
    return [leaf for leaf in flatten(tree).leaves if isinstance(leaf, Tensor)]


def map_tensors(function: Any, tree: Any) -> Any:
    """Replace each tensor in a tree with `function(tensor)`. Objects that hold tensors are rebuilt."""
    if isinstance(tree, Tensor):
        return function(tree)
    flat = flatten(tree)
    return unflatten([function(x) if isinstance(x, Tensor) else x for x in flat.leaves], flat.structure)


class _Walk:
    """One walk through a value."""

    def __init__(self, empty: bool, closed: Container[int], is_leaf: IsLeaf | None) -> None:
        self.leaves: list[Any] = []
        self.paths: list[str] = []
        self._empty, self._closed, self._is_leaf = empty, closed, is_leaf
        self._numbers: dict[int, int] = {}  # id of an object, or of a list or dict inside one -> its number
        self._bare: dict[int, Any] = {}  # objects that hold no tensor, kept so that their ids are not reused
        self._tensors = 0  # number of tensors, and of references to values seen before
        self._unseen = 0  # number of values too deep to look at
        self._budget = BUDGET

    def visit(self, value: Any, path: str, depth: int) -> TreeSpec:
        """Return the structure of a value. `depth`: how many objects enclose it."""
        kind = type(value)
        if isinstance(value, Tensor):
            self._tensors += 1
            return self._leaf(value, path)
        if kind in PLAIN:
            return self._leaf(value, path)
        if self._budget <= 0:
            return self._leaf_unseen(value, path)
        self._budget -= 1
        if self._is_leaf is not None and self._is_leaf(value, path):
            self._tensors += 1
            return self._leaf(value, path)
        if kind is tuple:
            return TreeSpec("tuple", None, self._items(value, path, depth))
        if kind is list or kind is dict:
            if depth:
                if id(value) in self._numbers:
                    return self._back("ref", self._numbers[id(value)])
                self._number(value)
            if kind is list:
                return TreeSpec("list", depth > 0, self._items(value, path, depth))
            children = tuple([self.visit(v, f"{path}[{k!r}]", depth) for k, v in value.items()])
            return TreeSpec("dict", (depth > 0, *value), children)
        opened_value = open_value(value)
        if opened_value is not None:
            pairs = zip(opened_value.children, opened_value.keys, strict=True)
            rebuild = Rebuild(kind, opened_value.context, opened_value.rebuild)
            return TreeSpec("known", rebuild, tuple([self.visit(c, path + key, depth) for c, key in pairs]))
        if kind is weakref.ref:
            number = self._numbers.get(id(value()))
            return self._leaf(value, path) if number is None else self._back("weak", number)
        return self._object(value, kind, path, depth)

    def _object(self, value: Any, kind: type, path: str, depth: int) -> TreeSpec:
        if id(value) in self._numbers:
            return self._back("ref", self._numbers[id(value)])
        base = rebuildable_base(kind)
        if base is None or id(value) in self._bare:
            return self._leaf(value, path)
        if depth >= DEPTH:
            return self._leaf_unseen(value, path)
        leaves, numbers, tensors, unseen = (
            len(self.leaves),
            len(self._numbers),
            self._tensors,
            self._unseen,
        )
        if base is not tuple:  # a tuple can be made only after its contents
            self._number(value)
        contents = (self._inside(value, base, path, depth + 1),)
        names = tuple(fields(value))
        children = [self.visit(v, f"{path}.{k}", depth + 1) for k, v in fields(value).items()]
        open_anyway = self._empty and id(value) not in self._closed
        if tensors == self._tensors and not open_anyway:  # no tensor in it: an ordinary value
            del self.leaves[leaves:], self.paths[leaves:]
            while len(self._numbers) > numbers:
                self._numbers.popitem()
            if unseen == self._unseen:
                self._bare[id(value)] = value
            return self._leaf(value, path)
        return TreeSpec("object", (kind, base, names), (*contents, *children))

    def _inside(self, value: Any, base: type, path: str, depth: int) -> TreeSpec:
        """Return the structure of the contents of a subclass of tuple, list or dict."""
        if base in (object, types.SimpleNamespace):
            return NOTHING
        if base in (tuple, list):
            return TreeSpec("tuple", None, self._items(base.__getitem__(value, slice(None)), path, depth))
        items = dict((OrderedDict if base is OrderedDict else dict).items(value))
        return TreeSpec(
            "dict", (False, *items), tuple([self.visit(v, f"{path}[{k!r}]", depth) for k, v in items.items()])
        )

    def _items(self, value: Sequence[Any], path: str, depth: int) -> tuple[TreeSpec, ...]:
        return tuple([self.visit(item, f"{path}[{index}]", depth) for index, item in enumerate(value)])

    def _leaf(self, value: Any, path: str) -> TreeSpec:
        self.leaves.append(value)
        self.paths.append(path)
        return LEAF

    def _leaf_unseen(self, value: Any, path: str) -> TreeSpec:
        self._unseen += 1
        return self._leaf(value, path)

    def _number(self, value: Any) -> None:
        self._numbers[id(value)] = len(self._numbers)

    def _back(self, op: str, number: int) -> TreeSpec:
        self._tensors += 1
        return TreeSpec(op, number)


def _build(spec: TreeSpec, leaves: Iterator[Any], objects: list[Any]) -> Any:
    """Rebuild a value. `objects`: the numbered objects so far, in the order in which they were met."""
    op, context, children = spec
    if op == "leaf":
        return next(leaves)
    if op == "tuple":
        return tuple([_build(child, leaves, objects) for child in children])
    if op == "list":
        items: list[Any] = []
        if context:
            objects.append(items)
        items.extend([_build(child, leaves, objects) for child in children])
        return items
    if op == "dict":
        numbered, *keys = context
        mapping: dict[Any, Any] = {}
        if numbered:
            objects.append(mapping)
        for key, child in zip(keys, children, strict=True):
            mapping[key] = _build(child, leaves, objects)
        return mapping
    if op == "known":
        assert isinstance(context, Rebuild)
        return context.function([_build(child, leaves, objects) for child in children], context.context)
    if op in ("ref", "weak"):
        target = objects[context]
        return target if op == "ref" else weakref.ref(target)
    return _build_object(spec, leaves, objects)


def _build_object(spec: TreeSpec, leaves: Iterator[Any], objects: list[Any]) -> Any:
    kind, base, names = spec.context
    contents, *children = spec.children
    if base is tuple:
        value = tuple.__new__(kind, _build(contents, leaves, objects))
    else:
        value = base.__new__(kind)
        objects.append(value)
        if base is list:
            list.extend(value, _build(contents, leaves, objects))
        elif base in (dict, OrderedDict):
            for key, item in _build(contents, leaves, objects).items():
                base.__setitem__(value, key, item)
    for name, child in zip(names, children, strict=True):
        set_field(value, name, _build(child, leaves, objects))
    return value


# -- objects ----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=4096)
def rebuildable_base(kind: type) -> type | None:
    """Return the built-in that a class derives from, or None if its objects cannot be rebuilt from that and their
    fields.

    None for classes written in C, for those with a `__del__`, and for those that must not be copied, such as modules
    and enumerations.
    """
    if kind in PLAIN or issubclass(kind, (nn.Module, enum.Enum, type, Leaf, Tensor)) or hasattr(kind, "__del__"):
        return None
    base = next(c for c in kind.__mro__ if not c.__flags__ & HEAP_TYPE)
    if base not in BASES or (base is kind and kind is not types.SimpleNamespace):
        return None
    try:
        base.__new__(kind)
    except TypeError:  # "object.__new__(X) is not safe": a class of C
        return None
    return base


def fields(value: Any) -> dict[str, Any]:
    """Return an object's own attributes by name: those in its `__dict__`, and its slots that are set."""
    values = dict(_attributes(value) or {})
    kind: Any = type(value)
    for name, slot in _slots(kind).items():
        try:
            values[name] = slot.__get__(value)
        except AttributeError:  # not set
            continue
    return values


def set_field(value: Any, name: str, new: Any) -> None:
    """Set an attribute of an object, bypassing its class's `__setattr__` (frozen dataclasses refuse)."""
    kind: Any = type(value)
    slot = _slots(kind).get(name)
    if slot is not None:
        slot.__set__(value, new)
        return
    attributes = _attributes(value)
    assert attributes is not None
    attributes[name] = new


def overwrite(old: Any, new: Any, visited: dict[int, Any] | None = None) -> None:
    """Give an object, list or dict the contents of another of its type, recursively where the types agree."""
    visited = {} if visited is None else visited
    visited[id(old)] = old

    def merge(before: Any, after: Any) -> Any:
        kind: Any = type(before)
        if type(before) is not type(after) or not (kind in (list, dict) or rebuildable_base(kind)):
            return after
        if id(before) not in visited:
            overwrite(before, after, visited)
        return before

    if isinstance(old, list):
        shared = [merge(a, b) for a, b in zip(old, new, strict=False)]
        list.__setitem__(old, slice(None), [*shared, *list.__getitem__(new, slice(len(shared), None))])
    elif isinstance(old, dict):
        base = OrderedDict if isinstance(old, OrderedDict) else dict
        items = {k: merge(dict.get(old, k), v) for k, v in base.items(new)}
        base.clear(old)
        for key, item in items.items():
            base.__setitem__(old, key, item)
    kind: Any = type(old)
    if rebuildable_base(kind) is None:
        return
    before = fields(old)
    for name, value in fields(new).items():
        set_field(old, name, merge(before.get(name), value))


def _attributes(value: Any) -> dict[str, Any] | None:
    try:
        attributes: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return attributes


@functools.lru_cache(maxsize=4096)
def _slots(kind: type) -> dict[str, Any]:
    """Return the slots of a class, inherited ones included, by attribute name."""
    return {
        name: slot
        for cls in reversed(kind.__mro__)
        if cls.__flags__ & HEAP_TYPE
        for name, slot in vars(cls).items()
        if isinstance(slot, types.MemberDescriptorType)
    }
