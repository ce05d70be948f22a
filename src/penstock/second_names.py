"""Second names for arguments: another library's name, or an old one."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from penstock.errors import ArgumentError

P = ParamSpec("P")
T = TypeVar("T")

OF_PIPELINE = {
    "loss": "loss_fn",
    "n_microbatches": "microbatches",
    "stages_per_rank": "chunks",
    "example_args": "args",
    "example_kwargs": "kwargs",
}
"""The second names of arguments of `pipeline`, `inspect` and `verify`."""


def nearest(name: str, known: Iterable[str], names: Mapping[str, str] = {}) -> str:
    """The end of a message about an unknown argument: the known one that it resembles, by its first name, if any."""
    near = difflib.get_close_matches(name, [*known], n=1)
    return f"; did you mean {names.get(near[0], near[0])}=?" if near else ""


def also(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Lets a function accept arguments under a second name: `also(loss="loss_fn")` makes `loss=` mean `loss_fn=`.

    The function raises ArgumentError if both are given, and TypeError for a name that it does not know, with the
    nearest one that it does.
    """

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        parameters = inspect.signature(function).parameters
        known = [*parameters, *names]
        takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            given: dict[str, Any] = kwargs
            for name in () if takes_any else given.keys() - set(known):
                raise TypeError(f"{function.__name__}() has no argument {name}={nearest(name, known, names)}")
            for second in names.keys() & given.keys():
                name = names[second]
                if name in given:
                    raise ArgumentError(f"{second}= and {name}= are one argument by two names: give one of them")
                given[name] = given.pop(second)
            return function(*args, **kwargs)

        return call

    return decorate
