"""A package's face whose names are loaded when they are first used (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def face(
    package: str, homes: Mapping[str, str], subpackages: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """The package's `__getattr__` and `__dir__`.

    Args:
        package: its `__name__`.
        homes: each name that it re-exports, and the module below it that defines the name.
        subpackages: modules that are imported as a whole.
    """

    def get(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{homes[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *subpackages})

    return get, names
