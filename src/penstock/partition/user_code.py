"""Tells the user's code, which may keep state of the model, from a library's, and names the line that is running."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

_OWN_CODE = (
    *(str(folder) + os.sep for folder in (Path(torch.__file__).parent, Path(__file__).parents[1])),
    *("<eval_with_key>", "<frozen "),
)
"""Each folder ends with a separator: other packages whose names begin with "torch" are the user's."""

_NN, _DEMO = str(Path(torch.nn.__file__).parent) + os.sep, str(Path(__file__).parents[1] / "demo") + os.sep


@cache
def is_ours(file: str) -> bool:
    """Whether a file of code is torch's or Penstock's."""
    return file.startswith(_OWN_CODE) and not file.startswith(_DEMO)


def current_line() -> str:
    """`file:line` of the running call."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_ours(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame else "unknown"


def raising_line(error: BaseException) -> str:
    """`file:line: code` of the user's innermost frame that the error passed through; without any, of torch.nn's."""
    entries = traceback.extract_tb(error.__traceback__)[::-1]
    users = (entry for entry in entries if not is_ours(entry.filename))
    entry = next(users, next((entry for entry in entries if entry.filename.startswith(_NN)), entries[0]))
    return f"{entry.filename}:{entry.lineno}" + (f": `{entry.line}`" if entry.line else "")


LIBRARIES = frozenset({*sys.stdlib_module_names, "torch", "numpy", "penstock"}) - {"__main__"}

CACHED = type(cache(id))

TORCH_ATTRIBUTES = frozenset(vars(nn.Module())) | {"_flat_weights", "_flat_weight_refs"}
"""The attributes that torch itself keeps in every module, or in recurrent ones."""


@cache
def is_library(module: str | None) -> bool:
    """Whether a Python module belongs to torch, numpy, Penstock or the standard library."""
    return package_name(module) in LIBRARIES


def package_name(module: str | None) -> str:
    """Return the outermost package of a Python module; empty if unknown."""
    return (module or "").partition(".")[0]


def iter_functions(member: Any) -> Iterator[FunctionType]:
    """Yield the functions of a class's member: a method or property, and what its decorators wrap
    (`@can_return_tuple`)."""
    member = getattr(member, "fget", None) or getattr(member, "__func__", member)
    while isinstance(member, (FunctionType, CACHED)):
        if isinstance(member, FunctionType):
            yield member
        member = getattr(member, "__wrapped__", None)
