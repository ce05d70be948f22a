"""Records custom autograd functions, and what `torch.vmap` maps: each `Function.apply`, or use of it, is one call.

One of them is torch's older checkpoint, which is treated as the newer one, whose calls can be recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from types import BuiltinMethodType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from penstock._base.compat import flex_attention
from penstock.errors import PartitionError
from penstock.partition import source
from penstock.partition.recorder.recorder import Recorder
from penstock.partition.recording.calls import called
from penstock.partition.recording.facts import Fact


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


class _Checkpoint(NamedTuple):
    """A line that calls a checkpoint, and the nodes of its calls."""

    line: str
    nodes: frozenset[fx.Node]


class Reentrant:
    """The older checkpoints of a recording (`use_reentrant=True`, torch's default), recorded as the newer one.

    Both compute the same values. But the older one trains nothing if none of its arguments requires a gradient, and it
    adds each checkpoint's gradients to `.grad` separately, so the terms of a parameter that is also used elsewhere come
    in another order.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._checkpoints: list[_Checkpoint] = []

    def run(self, function: Any, preserves_generators: bool, *args: Any) -> Any:
        """Runs an older checkpoint, as `CheckpointFunction.apply` would."""
        line, before = source.current_line(), len(self._recorder.facts)
        if torch.is_grad_enabled() and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserves_generators)
        else:
            with torch.no_grad():
                result = function(*args)
        nodes = frozenset(islice(self._recorder.facts, before, None))
        self._checkpoints.append(_Checkpoint(line, nodes))
        return result

    def check(self) -> None:
        """Raises PartitionError for what would differ from plain torch. Call this when the forward has ended."""
        if not self._checkpoints:
            return
        facts, parameters = self._recorder.facts, self._recorder.loan.names
        users: dict[int, set[fx.Node]] = {}
        for node, fact in facts.items():
            if fact.kind == "parameter":
                users.setdefault(id(self._recorder.loan.fakes[str(node.target)]), set()).update(node.users)
            for parameter in self._trained(fact):
                users.setdefault(id(parameter), set()).add(node)
        for one in self._checkpoints:
            for key, nodes in users.items():
                if nodes & one.nodes and not nodes <= one.nodes:
                    raise PartitionError(
                        f"{parameters[key]!r} is used in the torch.utils.checkpoint at {one.line} and outside of "
                        "it, and use_reentrant=True, its default, adds up such gradients in an order of its own. Pass "
                        "it use_reentrant=False"
                    )

    def _trained(self, fact: Fact) -> Iterable[Tensor]:
        modules = [self._recorder.model.get_submodule(name) for name in fact.units]
        return (p for module in modules for p in module.parameters() if p.requires_grad)
