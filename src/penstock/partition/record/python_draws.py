"""Python's and numpy's random numbers while a forward is recorded: who draws them, and whether any draw is overlooked.

Meanwhile their functions are replaced, including those that the modules of the model's classes imported by name. Draws
that reach the generators in any other way show in the generators' states. Runs give the draws their streams in
`runtime/exact/streams.py`; `fakes.py` puts the generators back.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType, FunctionType
from typing import Any

import numpy
import torch
from torch import nn

from penstock.partition.units import replaced
from penstock.partition.user_code import is_ours

Handler = Callable[..., Any]
"""Takes the name of a function that draws, the function, and its arguments."""

SEEDING = ("seed", "getstate", "setstate", "get_state", "set_state")


@cache
def drawing_functions() -> Mapping[str, Callable[..., Any]]:
    """Return the functions that draw from Python's and numpy's global generators, by qualified name."""
    functions: dict[str, Callable[..., Any]] = {}
    for name in random.__all__:
        function = getattr(random, name)
        if name not in SEEDING and isinstance(getattr(function, "__self__", None), random.Random):
            functions[f"random.{name}"] = function
    for name in dir(numpy.random):
        function = getattr(numpy.random, name)
        if name not in SEEDING and isinstance(getattr(function, "__self__", None), numpy.random.RandomState):
            functions[f"numpy.random.{name}"] = function
    return functions


def draw(name: str, *args: Any, **kwargs: Any) -> Any:
    """Repeat a recorded draw on a stage."""
    return drawing_functions()[name](*args, **kwargs)


@contextmanager
def redirect_draws(
    model: nn.Module, handler: Handler, swaps: Mapping[FunctionType, Callable[..., Any]], from_numpy: Callable[..., Any]
) -> Iterator[None]:
    """Redirect draws to `handler`, and `swaps`' keys and `torch.from_numpy` to their replacements, within a
    context."""
    new: dict[int, Any] = {id(function): value for function, value in swaps.items()}
    for name, function in drawing_functions().items():
        new[id(function)] = partial(handler, name, function)
    namespaces = _namespaces(model, swaps)
    changes = [
        (names, name, new[id(value)]) for names in namespaces for name, value in list(names.items()) if id(value) in new
    ]
    with replaced([*changes, (torch, "from_numpy", from_numpy)]):
        yield


def _namespaces(model: nn.Module, functions: Mapping[FunctionType, Any]) -> Iterator[dict[str, Any]]:
    """Yield the globals of `random`, of `numpy.random` and of every module that a class of the model comes from."""
    names = {"random", "numpy.random", *(function.__module__ for function in functions)}
    for kind in {type(module) for module in model.modules()}:
        names |= {base.__module__ for base in kind.__mro__}
    for name in sorted(names):
        if name in sys.modules and not name.startswith("torch.") and name != "builtins":
            yield vars(sys.modules[name])


def enclosing_function() -> FunctionType | None:
    """Return the outermost global function between the running line and the module whose forward it belongs to."""
    outermost: FunctionType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if not is_ours(code.co_filename):
            first = frame.f_locals.get(code.co_varnames[0]) if code.co_varnames else None
            if isinstance(first, nn.Module):
                return outermost
            function = frame.f_globals.get(code.co_name)
            function = getattr(function, "__wrapped__", function)
            if isinstance(function, FunctionType) and function.__code__ is code:
                outermost = function
        frame = frame.f_back
    return None


def generator_states() -> tuple[Any, ...]:
    """Return the states of Python's and numpy's generators, for comparison."""
    return random.getstate(), pickle.dumps(numpy.random.get_state(legacy=False))
