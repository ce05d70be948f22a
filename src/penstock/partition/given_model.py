"""The model as it is given: a list of layers as one model, in which each gets what the previous one returned, and the
keyword arguments that a pipeline adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature, signature
from typing import Any

from torch import nn

from penstock._base.errors import ArgumentError
from penstock._base.formatting import list_names


class Chain(nn.Module):
    """Runs layers one after another: modules and, as in DeepSpeed's lists, functions.

    A returned tuple is passed on as positional arguments, or whole to a layer that takes only one (DeepSpeed,
    torchgpipe). Keyword arguments go to every layer that accepts them.
    """

    def __init__(self, layers: Sequence[nn.Module | Callable[..., Any]]) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer if isinstance(layer, nn.Module) else Function(layer))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value, unused = args, {*kwargs}
        for layer in self._modules.values():
            assert layer is not None
            call_args = value if isinstance(value, tuple) else (value,)
            call_args = call_args if _accepts(layer, *call_args) or not _accepts(layer, call_args) else (call_args,)
            layer_kwargs = {name: kwargs[name] for name in kwargs if _accepts(layer, *call_args, **{name: None})}
            value, unused = layer(*call_args, **layer_kwargs), unused - layer_kwargs.keys()
        if unused:
            raise ArgumentError(
                f"kwargs: no layer accepts {list_names(sorted(unused))}; omit what the layers do not take"
            )
        return value


class Function(nn.Module):
    """A function as a layer."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def _accepts(layer: nn.Module, *args: Any, **kwargs: Any) -> bool:
    """Whether a call with these arguments, and perhaps more, fits the layer's signature."""
    try:
        signature(layer.function if isinstance(layer, Function) else layer.forward).bind_partial(*args, **kwargs)
    except ValueError:  # one of torch's functions
        return not kwargs
    except TypeError:
        return False
    return True


def as_module(model: Any) -> nn.Module:
    """Return the model itself, or its layers as a `Chain`. Raise ArgumentError for anything else."""
    while isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    layers = list(model) if isinstance(model, (Sequence, nn.ModuleList)) and not isinstance(model, str) else [model]
    for layer in layers:
        if isinstance(layer, type):
            raise ArgumentError(f"model={layer.__name__}: this is a class; pass an instance, {layer.__name__}(...)")
    if not layers or layers == [model] or not all(map(callable, layers)):
        raise ArgumentError(f"model: expected a module or a list of modules and functions, not {model!r}")
    return Chain(layers)


def default_kwargs(
    model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Keyword arguments that a pipeline adds to the caller's: `use_cache=False` for `transformers` models.

    A key-value cache is useless in training, and everything that a block writes into it would cross every later cut.
    Pass the same to the unsplit model when comparing.
    """
    if "use_cache" in (kwargs or {}) or not hasattr(model, "config") or not _keeps_a_cache(model):
        return {}
    model_signature = _signature(model)
    if "use_cache" in model_signature.parameters:
        is_passed = "use_cache" in model_signature.bind_partial(*args, **(kwargs or {})).arguments
        return {} if is_passed else {"use_cache": False}
    # A wrapper, such as that of `peft` or of a vision-language model, passes keyword arguments on to the model inside.
    forwards_kwargs = any(p.kind is p.VAR_KEYWORD for p in model_signature.parameters.values())
    return {"use_cache": False} if forwards_kwargs else {}


def _keeps_a_cache(model: nn.Module) -> bool:
    """Whether the model, or one inside it, makes a key-value cache unless told not to."""
    configured = (m for m in model.modules() if getattr(getattr(m, "config", None), "use_cache", False))
    return any("use_cache" in _signature(m).parameters for m in configured)


def _signature(module: nn.Module) -> Signature:
    forward: Callable[..., Any] = module.forward
    return signature(forward)
