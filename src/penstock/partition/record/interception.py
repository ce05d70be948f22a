"""Replaces attributes for a while, and the calls of modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from penstock.partition.units import (
    UnitCall,
)


@contextmanager
def replaced(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes, or entries of dicts, within a context. A change is an object or dict, a name and a value."""
    with ExitStack() as stack:
        for owner, name, value in changes:
            is_dict = type(owner) is dict
            put, names = (owner.__setitem__, owner) if is_dict else (partial(setattr, owner), vars(owner))
            stack.callback(*((put, name, names[name]) if name in names else (delattr, owner, name)))
            put(name, value)
        yield


@contextmanager
def intercept(modules: Iterable[nn.Module], handler: Callable[[UnitCall, nn.Module, Any, Any], Any]) -> Iterator[None]:
    """Send every call of the modules' classes through `handler(original, module, args, kwargs)`.

    This replaces the classes' `__call__` rather than the modules' `forward`, so that an override of `__call__`
    (gradient checkpointing in `transformers`) and the modules' hooks stay inside the unit.
    """

    def replacement(original: UnitCall) -> UnitCall:
        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807 - it stands in for the method
            return handler(original, self, args, kwargs)

        return __call__

    # looked up before any is replaced
    with replaced([(cls, "__call__", replacement(cls.__call__)) for cls in dict.fromkeys(map(type, modules))]):
        yield
