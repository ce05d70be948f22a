"""Converts a torch call, as a mode receives it, to a form that a graph node can print and run."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function, is_tensor_method_or_property

from penstock._base.pytree import flatten, unflatten

BINARY = (
    "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift lt le gt ge eq ne".split()  # noqa: SIM905
)
OPERATORS: Mapping[str, Callable[..., Any]] = {
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in BINARY},
    **{f"__{name}__": getattr(operator, f"__{name}__") for name in ("neg", "pos", "invert", "abs")},
    **{f"__i{name}__": getattr(operator, f"__i{name}__") for name in BINARY[:11]},
    "__div__": operator.truediv,
    "__idiv__": operator.itruediv,
    "__getitem__": operator.getitem,
    "__setitem__": operator.setitem,
}
REFLECTED: Mapping[str, Callable[..., Any]] = {
    **{f"__r{name}__": getattr(operator, f"__{name}__") for name in BINARY[:11]},
    "__rdiv__": operator.truediv,
}

REFUSED: Mapping[str, str] = {
    "backward": "runs a backward inside the forward",
    "register_hook": "registers a hook on an activation",
    "register_post_accumulate_grad_hook": "registers a hook on an activation",
    "retain_grad": "retains the gradient of an activation",
    "requires_grad_": "changes whether an activation takes a gradient",
    "set_": "swaps a tensor's memory",
    "grad": "runs a backward inside the forward",
}
"""Calls that would not give the same result when a stage replays them, and what they do."""


class Target(NamedTuple):
    """What to write into the graph: `op` is call_function or call_method."""

    op: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def function_name(function: Any) -> str:
    """Return a function's own name; for a property, the property's."""
    name = getattr(function, "__name__", str(function))
    if name in ("__get__", "__set__", "__delete__"):
        return getattr(getattr(function, "__self__", None), "__name__", name)
    return str(name)


def requested_gradient(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool | None:
    """Whether a call asks for a gradient: `x.requires_grad_()`, `x.requires_grad = True`; None if it does neither."""
    if getattr(function, "__name__", "") == "requires_grad_":
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    return bool(args[1]) if function_name(function) == "requires_grad" and len(args) == 2 else None


def taking_gradient(tensor: Tensor) -> Tensor:
    """Return a tensor's values as a tensor that requires a gradient."""
    return tensor.detach().requires_grad_()


def called(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function, as one call of torch's for function modes; `replace_functions` may have taken it apart."""
    if has_torch_function((function, *args)):
        return handle_torch_function(called, args, function, *args, **kwargs)
    flat = flatten((function, args, kwargs))
    function, args, kwargs = unflatten(flat.leaves, flat.structure)
    return function(*args, **kwargs)


def refusal_reason(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Why a call is refused, or None."""
    name = getattr(function, "__name__", "")
    if (requests_grad := requested_gradient(function, args, kwargs)) is not None:
        return REFUSED["requires_grad_"] if args[0].requires_grad and not requests_grad else None
    if name == "__set__":
        return f"assigns to `.{function_name(function)}` of an activation"
    if name == "grad":
        return REFUSED[name] if function is torch.autograd.grad else None
    return REFUSED.get(name)


def make_target(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Target:
    """Return how a graph makes this call."""
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return Target("call_function", getattr, (args[0], function_name(function)), {})
    if is_tensor_method_or_property(function):
        if name in OPERATORS and not kwargs:
            return Target("call_function", OPERATORS[name], args, {})
        if name in REFLECTED and not kwargs:
            return Target("call_function", REFLECTED[name], (args[1], args[0]), {})
        return Target("call_method", name, args, kwargs)
    return Target("call_function", function, args, kwargs)
