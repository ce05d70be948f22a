"""What a forward can reach besides tensors that are passed on: attributes, shared objects, closures, globals.

Not followed, as no published model needs it: attributes of classes, slots, arrays, default arguments, and variables
around functions.

A snapshot is restored after a recording, so that no fake tensor stays behind. Whatever changed in between is a way for
blocks to talk behind the model's back. Functions that keep results are found in all files that are no
library's.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Iterator
from contextvars import copy_context
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from penstock._base.closures import contents
from penstock.partition.names import enclosing
from penstock.partition.nested import CONSTANTS, hides_tensors
from penstock.partition.user_code import CACHED, TORCH_ATTRIBUTES, is_library, iter_functions, package_name

MAX_ENTRIES = 1000
"""Containers with more entries count as tables, not as places where a forward leaves something. `settings`, which looks
at every step, compares no more than `LENGTH`."""

PLAIN_OBJECTS = {"argparse", "collections", "types"}
"""Modules of the standard library whose objects exist to hold what users put there."""

WARNED = "__warningregistry__"
"""A file's first warning makes this global; it is not state."""

DEPTH = 5
"""How many objects and containers deep to look, from an attribute of a module on."""
INTERNAL = TORCH_ATTRIBUTES - {"training"}


@dataclass(frozen=True, slots=True, eq=False)
class Holder:
    """Something with entries: attributes of a module or an object, globals, or a container.

    Attributes:
        text: where a user finds it.
        entries: a dict, list, deque or set; for attributes and globals, the dict that they are in.
        before: a copy of the entries.
        attributes: whether the entries are attributes (of a module, if `module` is set) or globals.
        outside: whether it was found among globals, so that `text` is not a path from the model.
    """

    text: str
    entries: Any
    before: Any
    attributes: bool = False
    module: bool = False
    outside: bool = False

    def is_changed(self) -> bool:
        """Whether an entry is a different object from before."""
        return self.differs(self.before)

    def differs(self, before: Any) -> bool:
        """Whether an entry is a different object from the one in a copy."""
        current = self.entries
        if len(current) != len(before) + (self.attributes and WARNED in current and WARNED not in before):
            return True
        if isinstance(current, dict):
            same = all(map(operator.is_, current.values(), before.values())) and all(map(operator.eq, current, before))
            return not same
        if isinstance(current, set):
            return {id(item) for item in current} != {id(item) for item in before}
        return not all(map(operator.is_, current, before))

    def changes(self) -> Iterator[tuple[Any, Any]]:
        """Yield the key and the new value of each entry that is new or a different object from before."""
        if isinstance(self.entries, dict):
            for key, value in self.entries.items():
                hidden = key in INTERNAL if self.module else key == WARNED
                if not hidden and (key not in self.before or self.before[key] is not value):
                    yield key, value
        elif self.is_changed():
            yield None, self.copied()

    def put(self, entries: Any) -> None:
        """Replace all entries."""
        current = self.entries
        if isinstance(current, dict):  # never empty in between: globals may be in use by other threads
            for key in [key for key in current if key not in entries]:
                del current[key]
            for key, value in entries.items():
                if key not in current or current[key] is not value:
                    current[key] = value
            if [*current] != [*entries]:  # in another order
                refill(current, entries)
        else:
            refill(current, entries)

    def copied(self) -> Any:
        """Return the entries as they are now."""
        return self.entries.copy()

    def name(self, key: Any) -> str:
        if key is None:
            return self.text
        return f"{self.text}.{key}".lstrip(".") if self.attributes else f"{self.text}[{key!r}]"


class Reach:
    """The places that a model's forward can reach, in the state in which they were when this was made."""

    def __init__(self, model: nn.Module) -> None:
        self.holders: list[Holder] = []
        kinds = dict.fromkeys(base for module in model.modules() for base in type(module).__mro__)
        self.files, cached = _find_code(frozenset(kind for kind in kinds if not is_library(kind.__module__)))
        self.cached = CachedFunctions(cached)
        self._seen: set[int] = set()
        self._first: dict[int, str] = {}  # object -> where it was found
        self._repeats: list[tuple[str, str]] = []  # where it was found first, and where again (empty: among globals)
        self._outside = False
        modules: dict[str, Any] = dict(model.named_modules())
        self._seen |= {id(module) for module in modules.values()}
        for name, module in modules.items():
            self._add_module(name, module, DEPTH)
        for kind in kinds:
            if not has_no_user_data(kind.__module__):
                self._visit(vars(kind).get("forward"), kind.__name__, 2)
        del self._seen, self._first
        self._below: defaultdict[str, list[Holder]] = defaultdict(list)
        for holder in self.holders:
            for path in () if holder.outside else enclosing(holder.text):
                self._below[path].append(holder)
        self._elsewhere: defaultdict[str, list[str]] = defaultdict(list)
        for first, text in self._repeats:
            for path in enclosing(text):
                self._elsewhere[path].append(first)

    def holders_in(self, name: str) -> list[Holder]:
        """Return the places in the module of that name and in objects that it holds, also if others hold them too."""
        groups = [self._below.get(path, ()) for path in (name, *self._elsewhere.get(name, ()))]
        return list({id(holder): holder for group in groups for holder in group}.values())

    def changed(self) -> list[Holder]:
        return [holder for holder in self.holders if holder.is_changed()]

    def names_changed(self) -> list[str]:
        """Return the names of attributes and the like that the forward has set."""
        return [holder.name(key) for holder in self.changed() for key, _ in holder.changes() if key != "training"]

    def restore(self) -> None:
        for holder in self.changed():
            holder.put(holder.before)
        self.cached.forget()

    def _add(self, text: str, entries: Any, **kind: bool) -> None:
        self.holders.append(Holder(text, entries, entries.copy(), outside=self._outside, **kind))

    def _add_module(self, name: str, module: nn.Module, depth: int) -> None:
        attributes = vars(module)
        self._add(name, attributes, attributes=True, module=True)
        for key, value in attributes.items():
            if "_hooks" in key and isinstance(value, dict):
                for hook in value.values():
                    self._visit(hook, f"{name}.{key}".lstrip("."), depth)
            elif key not in INTERNAL:
                self._visit(value, f"{name}.{key}".lstrip("."), depth)

    def _visit(self, value: Any, text: str, depth: int) -> None:
        if depth == 0 or type(value) in CONSTANTS or isinstance(value, (Tensor, type, ModuleType)):
            return
        if id(value) in self._seen:
            if id(value) in self._first:
                self._repeats.append((self._first[id(value)], "" if self._outside else text))
            return
        self._seen.add(id(value))
        if not self._outside:
            self._first[id(value)] = text
        if isinstance(value, nn.Module):
            self._add_module(text, value, depth - 1)
        elif isinstance(value, FunctionType):
            self._visit_function(value, depth)
        elif isinstance(value, MethodType):
            self._visit(value.__func__, text, depth)
            self._visit(value.__self__, text, depth)
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._visit(part, text, depth)
        elif isinstance(value, tuple) or is_container(value):
            self._visit_container(value, text, depth)
            self._visit_attributes(value, text, depth)
        else:
            self._visit_attributes(value, text, depth)

    def _visit_container(self, value: Any, text: str, depth: int) -> None:
        items: Any = [*tuple.__iter__(value)] if isinstance(value, tuple) else value  # not a subclass's own iteration
        if len(items) > MAX_ENTRIES:
            return
        if not isinstance(value, tuple):
            self._add(text, value)
        items = items.items() if isinstance(value, dict) else enumerate(items)
        for key, item in list(items):
            self._visit(item, f"{text}[{key!r}]", depth - 1)

    def _visit_attributes(self, value: Any, text: str, depth: int) -> None:
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and attributes is not value and not has_no_user_data(type(value).__module__):
            self._add(text, attributes, attributes=True)
            for key, item in list(attributes.items()):
                self._visit(item, f"{text}.{key}", depth - 1)

    def _visit_function(self, function: FunctionType, depth: int) -> None:
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType):
            return
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            if id(cell) not in self._seen:
                self._seen.add(id(cell))
                self._visit(contents(cell), f"{name}, a variable around {function.__qualname__}", depth - 1)
        namespace = function.__globals__
        module = str(namespace.get("__name__", ""))
        if id(namespace) not in self._seen and not has_no_user_data(module):
            self._seen.add(id(namespace))
            before, self._outside = self._outside, True
            self._add(module, namespace, attributes=True)
            for key, item in list(namespace.items()):
                if not key.startswith("__") and not isinstance(item, FunctionType):
                    self._visit(item, f"{module}.{key}", min(depth, 2))
            self._outside = before


def holders_in_context() -> list[Holder]:
    """Return the containers that context variables hold now, such as the lists in which hooks collect what blocks
    return."""
    holders: dict[int, Holder] = {}
    pending = [(variable.name, value) for variable, value in copy_context().items()]
    while pending:
        text, value = pending.pop()
        if is_container(value) and len(value) <= MAX_ENTRIES and id(value) not in holders:
            holders[id(value)] = Holder(text, value, value.copy())
            items = value.items() if isinstance(value, dict) else enumerate(value)
            pending += [(f"{text}[{key!r}]", item) for key, item in items]
    return list(holders.values())


def has_no_user_data(module: str) -> bool:
    """Whether objects of classes from this Python module hold nothing that the user put there."""
    return not module or (is_library(module) and package_name(module) not in PLAIN_OBJECTS)


_KINDS = frozenset({list, deque, dict, OrderedDict, defaultdict, Counter, set})


def is_container(value: Any) -> bool:
    """Whether a value is a list, a deque, a dict or a set. Of other classes, even copying may have side effects."""
    return type(value) in _KINDS


def refill(container: Any, contents: Any) -> None:
    """Give a container the contents of a copy of it, in the same order."""
    container.clear()
    if isinstance(container, (list, deque)):
        container.extend(contents)
    else:
        container.update(contents)


_CODE = (FunctionType, CACHED, staticmethod, classmethod, property)


@functools.lru_cache(maxsize=8)  # a model is recorded several times, and its code does not change
def _find_code(kinds: frozenset[type]) -> tuple[list[dict[str, Any]], list[Any]]:
    """Return the globals of all files that are no library's, and the functions there that keep results
    (`functools.cache`): in a file, in a class, these included, or in a variable around a function."""
    modules = [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    files = [vars(module) for name, module in modules if not is_library(name)]
    values = {id(value): value for group in (kinds, *map(dict.values, files)) for value in group}
    members = list(values.values())
    for kind in [value for value in members if issubclass(type(value), type)]:
        members += () if is_library(str(kind.__module__)) else vars(kind).values()
    functions = (f for value in members if type(value) in _CODE for f in iter_functions(value))
    members += [contents(cell) for function in functions for cell in function.__closure__ or ()]
    return files, list({id(value): value for value in members if type(value) is CACHED}.values())


class CachedFunctions:
    """Functions that keep results. A table of positions with fake tensors (DINOv3's) must not stay: neither for the
    next plain forward, nor for another block, where it would look like a tensor passed behind the model's back. Entries
    are looked at only if there are new ones."""

    def __init__(self, cached: Iterable[Any]) -> None:
        self._misses = {function: function.cache_info().misses for function in cached}

    def forget(self) -> None:
        """Empty those that have cached something new that contains a tensor."""
        for function, old_misses in self._misses.items():
            misses = function.cache_info().misses
            if misses != old_misses:
                if hides_tensors(function):
                    function.cache_clear()
                    misses = 0
                self._misses[function] = misses
