"""Records custom autograd functions, and what `torch.vmap` maps: each `Function.apply`, or use of it, is one call.

One of them is torch's older checkpoint, which is treated as the newer one, whose calls can be recorded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import BuiltinMethodType, MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from penstock._base.compat import flex_attention
from penstock._base.errors import PartitionError
from penstock.partition.record.call_targets import called
from penstock.partition.record.recorder import Recorder
from penstock.partition.units import replaced
from penstock.partition.user_code import current_line


@contextmanager
def following_functions(recorder: Recorder) -> Iterator[None]:
    """Send `Function.apply` to the recorder, so that a custom function is one call; and show function modes what
    `torch.vmap` maps, and the mask of `create_block_mask`, which maps a function, too."""
    torch_apply, older = torch.autograd.Function.__dict__["apply"], OlderCheckpoints(recorder)

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction and not recorder.is_paused:
            return older.run(*args)
        return recorder.call_autograd_function(torch_apply.__get__(None, cls), cls, args, kwargs)

    bound_applies = _new_applies(torch_apply, apply, recorder)
    vmap, flex = torch.vmap, flex_attention() or SimpleNamespace(create_mask=None)

    def mapped(*args: Any, **kwargs: Any) -> Any:
        return partial(called, vmap(*args, **kwargs))

    maps = (
        (torch, "vmap", mapped),
        (torch.func, "vmap", mapped),
        (flex, "create_mask", partial(called, flex.create_mask)),
    )
    with replaced([(torch.autograd.Function, "apply", classmethod(apply)), *bound_applies, *maps]):
        yield
        older.check()


def _new_applies(torch_apply: Any, new: Any, recorder: Recorder) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield the changes for all that holds a bound `apply`, such as `swish = Swish.apply` in a file or a module.

    Args:
        torch_apply: torch's `apply`: a class method in Python, since torch 2.15 in C.
    """
    for names in (*map(vars, recorder.model.modules()), *recorder.reach.files):
        for name, value in list(names.items()):
            cls = value.__self__ if type(value) in (MethodType, BuiltinMethodType) else None
            is_function = isinstance(cls, type) and issubclass(cls, torch.autograd.Function)
            if is_function and value == torch_apply.__get__(None, cls):
                yield names, name, MethodType(new, cls)


class OlderCheckpoints:
    """torch's older checkpoints (`use_reentrant=True`, transformers' default before 5.0), recorded as the newer one.

    Both compute the same values. But the older one trains nothing if none of its arguments requires a gradient, and
    adds its gradients to `.grad` separately, so the terms of a weight that is also used elsewhere come in another
    order.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._ran: list[tuple[str, range]] = []  # each one's line, and the numbers of its calls

    def run(self, function: Any, preserves_generators: bool, *args: Any) -> Any:
        """Run an older checkpoint, as `CheckpointFunction.apply` would."""
        if not torch.is_grad_enabled() or not any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
            with torch.no_grad():
                return function(*args)
        line, first = current_line(), self._recorder.observer.position
        result = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserves_generators)
        self._ran.append((line, range(first, self._recorder.observer.position)))
        return result

    def check(self) -> None:
        """Raise PartitionError for weights that are also used elsewhere. Call this when the forward has ended."""
        loan, facts, uses = self._recorder.loan, self._recorder.facts, defaultdict[str, set[int]](set)
        for node, fact in facts.items() if self._ran else ():
            modules, indices = map(self._recorder.model.get_submodule, fact.units), {fact.index}
            weights: list[Tensor] = [parameter for module in modules for parameter in module.parameters()]
            if fact.kind == "parameter":
                weights, indices = [loan.fakes[str(node.target)]], {facts[user].index for user in node.users}
            for name in (loan.names[id(tensor)] for tensor in weights if tensor.requires_grad):
                uses[name] |= indices
        for line, calls in self._ran:
            for name, indices in uses.items():
                if not indices.isdisjoint(calls) and not indices.issubset(calls):
                    raise PartitionError(
                        f"{name!r} is used in the torch.utils.checkpoint at {line} and outside of it, and "
                        "use_reentrant=True, its default, adds up such gradients in an order of its own. Pass it "
                        "use_reentrant=False"
                    )
