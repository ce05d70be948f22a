"""The data of a class as a dict: counters, registries and caches that all its objects share."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from types import FunctionType
from typing import Any

_GONE = object()
_CODE = (FunctionType, staticmethod, classmethod, property, type)


class ClassData(MutableMapping[str, Any]):
    """A class's own attributes, without methods and other descriptors. Setting one sets it on the class."""

    def __init__(self, cls: type) -> None:
        self._cls = cls
        self._hidden = {name for name, value in vars(cls).items() if not _is_data(name, value)}

    def __getitem__(self, name: str) -> Any:
        return vars(self._cls)[name]

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._cls, name, value)

    def __delitem__(self, name: str) -> None:
        delattr(self._cls, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in vars(self._cls) if name not in self._hidden and not name.startswith("__")])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def differs(self, before: dict[str, Any]) -> bool:
        """Whether an attribute is a different object from the one in a copy."""
        attributes = vars(self._cls)
        if any(attributes.get(name, _GONE) is not value for name, value in before.items()):
            return True
        return any(not name.startswith("__") for name in attributes.keys() - self._hidden - before.keys())

    def copy(self) -> dict[str, Any]:
        return dict(self)


class SlotData(ClassData):
    """The contents of an object's slots, as a dict."""

    def __init__(self, owner: Any, names: tuple[str, ...]) -> None:
        self._owner, self._names = owner, names

    def __getitem__(self, name: str) -> Any:
        value = getattr(self._owner, name, _GONE)
        if value is _GONE:
            raise KeyError(name)
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter([name for name in self._names if hasattr(self._owner, name)])

    def differs(self, before: dict[str, Any]) -> bool:
        """Whether a slot holds a different object from the one in a copy."""
        return any(getattr(self._owner, name, _GONE) is not before.get(name, _GONE) for name in self._names)


def _is_data(name: str, value: Any) -> bool:
    return not name.startswith("__") and not isinstance(value, _CODE) and not hasattr(type(value), "__get__")
