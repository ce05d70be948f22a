"""Tells the user's code, which may keep state of the model, from a library's, which does not."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from types import FunctionType
from typing import Any

from torch import nn

LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "penstock"}) - {"__main__"}

_CACHED = type(functools.cache(id))

OF_TORCH = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""The attributes that torch itself keeps in every module, or in recurrent ones."""


@functools.cache
def is_library(module: str | None) -> bool:
    """Whether a Python module belongs to torch, numpy, Penstock or the standard library."""
    return package_of(module) in LIBRARIES


def package_of(module: str | None) -> str:
    """The outermost package of a Python module; empty if unknown."""
    return (module or "").partition(".")[0]


def functions_of(member: Any) -> Iterator[FunctionType]:
    """The functions of a class's member: a method or property, and what its decorators wrap (`@can_return_tuple`)."""
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    while isinstance(member, (FunctionType, _CACHED)):
        if isinstance(member, FunctionType):
            yield member
        member = getattr(member, "__wrapped__", None)
