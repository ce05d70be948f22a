"""Records custom autograd functions, and what `torch.vmap` maps: each `Function.apply`, or use of it, is one call.

One of them is torch's older checkpoint, which is treated as the newer one, whose calls can be recorded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from penstock._base.compat import flex_attention
from penstock.partition.recorder.recorder import Recorder
from penstock.partition.recording.calls import called


@contextmanager
def autograd_functions(recorder: Recorder) -> Iterator[None]:
    """Sends `Function.apply` to the recorder, so that a custom function is one call."""
    own = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and not recorder.is_paused:
            return _older_checkpoint(*args)
        return recorder.call_autograd_function(own.__get__(None, cls), cls, args, kwargs)

    bound = list(_bound(own, recorder))
    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment]
    for names, name, method in bound:
        names[name] = MethodType(apply, method.__self__)
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]
        for names, name, method in bound:
            names[name] = method


@contextmanager
def mapped_functions() -> Iterator[None]:
    """Shows function modes what `torch.vmap` maps, and the mask of `create_block_mask`, which maps a function, too."""
    vmap, flex = torch.vmap, flex_attention() or SimpleNamespace(create_mask=None)
    create_mask = flex.create_mask
    torch.vmap = torch.func.vmap = lambda *args, **kwargs: partial(called, vmap(*args, **kwargs))
    flex.create_mask = partial(called, create_mask)
    try:
        yield
    finally:
        torch.vmap = torch.func.vmap = vmap
        flex.create_mask = create_mask


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


def _older_checkpoint(function: Any, preserves_generators: bool, *args: Any) -> Any:
    """What torch's older checkpoint (`use_reentrant=True`, its default) computes, by the newer one, whose calls can be
    recorded. It trains nothing if none of its arguments requires a gradient."""
    if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserves_generators)
    with torch.no_grad():
        return function(*args)
