"""What is loaded on first use: the names of package interfaces (PEP 562), packages under their old names, and what the
face lends to lower floors.

Imports next to nothing itself: until `penstock.__main__` runs, a Ctrl-C ends in a traceback.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping
    from types import ModuleType
    from typing import Any


def face(
    package: str, homes: Mapping[str, str], subpackages: Collection[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__all__`, `__getattr__` and `__dir__`.

    Args:
        package: the package's `__name__`.
        homes: for each module, relative to the package, the names that the package re-exports from it, with spaces.
        subpackages: modules to import as a whole.
    """
    home_of = {name: home for home, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in subpackages:
            return _imported(f"{package}.{name}")
        if new := renamed.get(f"{package}.{name}"):
            return get(new)
        if name not in home_of:
            from penstock._base.second_names import of_peer

            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{of_peer(name) and f'; {of_peer(name)}'}"
            )
        value = getattr(_imported(f"{package}.{home_of[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of, *subpackages})

    return [*home_of], get, names


renamed: dict[str, str] = {}
"""New names in packages, by the old ones with their package, which are accepted for a release."""


def old_names(package: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that finds what is `renamed`."""

    def get(name: str) -> Any:
        if new := renamed.get(f"{package}.{name}"):
            return getattr(sys.modules[package], new)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


moved: dict[str, str] = {}
"""Packages that can be imported under their old names for a release, by these. `penstock/__init__.py` fills it."""


class _Moved:
    """Finds `moved` packages and their modules where they are now."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        for old, now in moved.items():
            there = now + name.removeprefix(old)
            if f"{name}.".startswith(f"{old}.") and find_spec(there) is not None:
                return ModuleSpec(name, cls, loader_state=there)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave the creation to `exec_module`, which replaces the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        assert module.__spec__ is not None
        now = sys.modules[module.__name__] = import_module(module.__spec__.loader_state)
        for old, new in renamed.items():  # a module of before has its names of before
            if new in vars(now):
                vars(now).setdefault(old.rpartition(".")[2], vars(now)[new])


sys.meta_path.insert(0, _Moved)

lent: dict[str, str] = {}
"""The modules that do what a lower floor offers, by task. `penstock/__init__.py`, which knows all floors, fills it."""


def borrowed(task: str) -> ModuleType:
    """Return the module that does a task of `lent`, loaded now."""
    return _imported(lent[task])


def _imported(module: str) -> ModuleType:
    """Import the module. A program that has seeded `random` finds it as it left it, whatever libraries draw on
    import."""
    import random

    before = random.getstate()
    try:
        return import_module(module)
    finally:
        random.setstate(before)
