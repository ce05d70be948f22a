"""Frozen dataclasses from the plain values of a JSON file, checked by their annotations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.errors import ArgumentError
from penstock.words import shortened

T = TypeVar("T")


def read_as(kind: type[T], given: Any, what: str, version: int) -> T:
    """An instance of a dataclass from an object of JSON.

    Raises:
        ArgumentError: something is missing, unknown to this version or of another type; names it within `what`.
    """
    of_kind: Any = kind
    hints, needed = _hints(of_kind)
    if not isinstance(given, dict):
        raise ArgumentError(f"{what}: expected an object with {shortened(sorted(needed))}, not {given!r:.40}")
    if missing := sorted(needed - given.keys()):
        raise ArgumentError(f"{what}: misses {shortened(missing)}")
    if unknown := sorted(given.keys() - hints.keys()):
        raise ArgumentError(f"{what}: has {shortened(unknown)}, which version {version} does not know")
    values = {name: _value(hints[name], value, name, what, version) for name, value in given.items()}
    try:
        return kind(**values)
    except ArgumentError as error:
        raise ArgumentError(f"{what}: {error}") from None


def check_numbers(what: str, value: Any) -> None:
    """Raises ArgumentError if one of a dataclass's seconds or bytes is not a number of 0 or more."""
    for each in (f for f in fields(value) if "seconds" in f.name or "bytes" in f.name):
        name, number = each.name, getattr(value, each.name)
        if number is None and each.default is None:
            continue
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number < math.inf:
            raise ArgumentError(f"{what}: {name}={number!r}; expected a number of 0 or more")


@cache
def _hints(kind: Any) -> tuple[Mapping[str, Any], frozenset[str]]:
    """The fields' types, and the names of those that have no default."""
    hints = get_type_hints(kind)
    known = [f for f in fields(kind) if f.init]
    needed = frozenset(f.name for f in known if f.default is MISSING and f.default_factory is MISSING)
    return {f.name: hints[f.name] for f in known}, needed


def _value(hint: Any, value: Any, name: str, what: str, version: int) -> Any:
    """The value of a field; `name`: its name, or that of the list that it is in."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        if value not in inner:
            raise ArgumentError(f"{what}: {name}={value!r}: expected one of {inner}")
        return value
    if origin is UnionType:
        one = next(each for each in inner if each is not type(None))
        return None if value is None else _value(one, value, name, what, version)
    if origin is tuple:
        of_objects = " of objects" if is_dataclass(inner[0]) else ""
        if not isinstance(value, list) or (of_objects and not all(isinstance(one, dict) for one in value)):
            raise ArgumentError(f"{what}: {name}: expected a list{of_objects}")
        return tuple(_value(inner[0], one, f"{name}[{index}]", what, version) for index, one in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise ArgumentError(f"{what}: {name}: expected an object")
        return {key: _value(inner[1], one, f"{name}[{key!r}]", what, version) for key, one in value.items()}
    if is_dataclass(hint):
        assert isinstance(hint, type)
        called = f"{name.rpartition('[')[0].removesuffix('s')} {value['name']!r}" if "name" in value else name
        return read_as(hint, value, f"{what}, {called}", version)
    number = hint is float and isinstance(value, int)
    if isinstance(value, bool) or not (isinstance(value, hint) or number):
        expected = {str: "a text", int: "a whole number", float: "a number"}[hint]
        raise ArgumentError(f"{what}: {name}={value!r:.40}; expected {expected}")
    return value
