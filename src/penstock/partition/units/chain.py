"""A list of modules as one model, in which each module gets what the previous one returned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.errors import ArgumentError


class Chain(nn.Module):
    """Runs modules one after another. A returned tuple is passed on as positional arguments."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        for index, layer in enumerate(layers):
            self.add_module(str(index), layer)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first, *rest = self._modules.values()
        assert first is not None
        value = first(*args, **kwargs)
        for layer in rest:
            assert layer is not None
            value = layer(*value) if isinstance(value, tuple) else layer(value)
        return value


def as_module(model: nn.Module | Sequence[nn.Module]) -> nn.Module:
    """The model itself, or its layers as a `Chain`. Raises ArgumentError for anything else."""
    if isinstance(model, nn.Module) and not isinstance(model, nn.ModuleList):
        return model
    layers = list(model) if isinstance(model, (list, tuple, nn.ModuleList)) else []
    if not layers or not all(isinstance(layer, nn.Module) for layer in layers):
        raise ArgumentError(f"model: expected a module or a list of modules, not {model!r}")
    return Chain(layers)


def public_names(model: nn.Module, names: Sequence[str]) -> dict[str, str]:
    """The names by which users know a model's parameters or buffers.

    These are the model's own names; for a `Chain`, the layers' own names, prefixed with the layer's index only if two
    layers would share one.
    """
    if not isinstance(model, Chain):
        return {name: name for name in names}
    bare = {name: name.partition(".")[2] for name in names}
    counts = Counter([*bare.values(), *names])
    return {name: short if counts[short] == 1 else name for name, short in bare.items()}


def known_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter or buffer in the model to the first, by which users know it."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    first: dict[int, str] = {}
    for name, tensor in every:
        first.setdefault(id(tensor), name)
    public = public_names(model, list(first.values()))
    return {name: public[first[id(tensor)]] for name, tensor in every}
