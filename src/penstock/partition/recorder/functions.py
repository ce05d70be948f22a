"""Records custom autograd functions: each `Function.apply` is one call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import BuiltinMethodType, MethodType
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointFunction

from penstock.partition.recorder.recorder import Recorder
from penstock.partition.recorder.reentrant import Reentrant


@contextmanager
def autograd_functions(recorder: Recorder) -> Iterator[None]:
    """Sends `Function.apply` to the recorder, so that a custom function is one call."""
    own = torch.autograd.Function.__dict__["apply"]
    reentrant = Reentrant(recorder)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and not recorder.is_paused:
            return reentrant.run(*args)
        return recorder.call_autograd_function(own.__get__(None, cls), cls, args, kwargs)

    bound = list(_bound(own, recorder))
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    for names, name, method in bound:
        names[name] = MethodType(apply, method.__self__)
    try:
        yield
        reentrant.check()
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
        for names, name, method in bound:
            names[name] = method


def _bound(own: Any, recorder: Recorder) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """The places that hold a bound `apply`, such as `swish = Swish.apply` in a file or a module.

    Args:
        own: torch's `apply`: a class method in Python, since torch 2.15 in C.
    """
    attributes = (vars(module) for module in recorder.model.modules())
    for names in (*attributes, *(value for value in recorder.reach.named if type(value) is dict)):
        for name, value in list(names.items()):
            if type(value) in (MethodType, BuiltinMethodType) and _is_apply(value, own):
                yield names, name, value


def _is_apply(method: Any, own: Any) -> bool:
    cls = method.__self__
    return isinstance(cls, type) and issubclass(cls, torch.autograd.Function) and method == own.__get__(None, cls)
