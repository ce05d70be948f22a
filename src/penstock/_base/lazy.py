"""Loads on first use: the names of package interfaces (PEP 562), packages under their old names, and what the
top package lends to lower layers.

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


def lazy_exports(
    package: str, names_by_module: Mapping[str, str], subpackages: Collection[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__all__`, `__getattr__` and `__dir__`.

    Args:
        package: the package's `__name__`.
        names_by_module: for each module, relative to the package, the names to re-export, separated by spaces.
        subpackages: modules to import as a whole.
    """
    module_of_name = {name: module for module, names in names_by_module.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in subpackages:
            return _import(f"{package}.{name}")
        if new := renamed.get(f"{package}.{name}"):
            return get(new)
        if name not in module_of_name:
            from penstock._base.aliases import peer_remedy

            raise AttributeError(
                f"module {package!r} has no attribute {name!r}{peer_remedy(name) and f'; {peer_remedy(name)}'}"
            )
        value = getattr(_import(f"{package}.{module_of_name[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *module_of_name, *subpackages})

    return [*module_of_name], get, names


renamed: dict[str, str] = {}
"""Maps `package.old_name` to the new name; old names are accepted for a release."""


def find_old_names(package: str) -> Callable[[str], Any]:
    """Return a package's `__getattr__` that finds `renamed` names."""

    def get(name: str) -> Any:
        if new := renamed.get(f"{package}.{name}"):
            return getattr(sys.modules[package], new)
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get


moved: dict[str, str] = {}
"""Maps old names of packages to new ones, for a release. `penstock/__init__.py` fills it."""


class _Moved:
    """Finds `moved` packages and their modules where they are now."""

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        for old, new in moved.items():
            new_name = new + name.removeprefix(old)
            if f"{name}.".startswith(f"{old}.") and find_spec(new_name) is not None:
                return ModuleSpec(name, cls, loader_state=new_name)  # type: ignore[arg-type]
        return None

    @staticmethod
    def create_module(spec: ModuleSpec) -> None:
        """Leave the creation to `exec_module`, which replaces the module."""

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        assert module.__spec__ is not None
        loaded = sys.modules[module.__name__] = import_module(module.__spec__.loader_state)
        for old, new in renamed.items():  # an old module has its old names, too
            if new in vars(loaded):
                vars(loaded).setdefault(old.rpartition(".")[2], vars(loaded)[new])


sys.meta_path.insert(0, _Moved)

providers: dict[str, str] = {}
"""Maps tasks of lower layers to modules of higher ones. `penstock/__init__.py`, which knows all layers, fills it."""


def load_provider(task: str) -> ModuleType:
    """Return the module that does a task of `providers`, loaded now."""
    return _import(providers[task])


def _import(module: str) -> ModuleType:
    """Import the module, and restore the state of `random`, from which libraries may draw on
    import."""
    import random

    random_state = random.getstate()
    try:
        return import_module(module)
    finally:
        random.setstate(random_state)
