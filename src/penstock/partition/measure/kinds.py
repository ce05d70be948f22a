"""Which units of a recording run the same code on the same shapes, so that one is measured for all of them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from penstock.partition.stages.split import CutRecording

NUMBERS_OF_PLACES = ("idx", "index", "id", "number", "layer_num", "depth")
"""Attributes whose names end like this say which of several blocks a module is, not what it does."""


def kind_of(split: CutRecording, stage: int) -> Hashable:
    """A value that is equal for two units only if they run the same: the recorded calls, the work of each, the modules
    that they call, with all their settings, and the shapes of everything."""
    plan = split.plans[stage]
    numbers = {node: number for number, node in enumerate(plan.received)}
    calls = []
    for node in plan.run:
        numbers[node] = len(numbers)
        fact = split.facts[node]
        target = tuple(_module(split.model.get_submodule(name)) for name in fact.units) or _target(split, node)
        calls.append((target, _plain((node.args, node.kwargs), numbers), fact.work, fact.meta, fact.modes))
    received = tuple(value.meta for value in plan.inputs)
    returned = tuple((numbers[node], value.meta) for node, value in zip(plan.returned, plan.outputs, strict=True))
    return tuple(calls), received, returned


def _target(split: CutRecording, node: fx.Node) -> Hashable:
    fact = split.facts[node]
    if fact.kind in ("parameter", "buffer", "constant"):
        tensor = split.recording.held.get(str(node.target))
        return (fact.kind, str(node.target)) if tensor is None else (fact.kind, *_tensor(tensor))
    return node.op, str(node.target)


def _module(module: nn.Module) -> Hashable:
    """What a module does: the classes, settings and shapes of all modules in it."""
    return tuple(
        (
            name,
            type(inner),
            inner.training,
            _settings(inner),
            tuple((key, _tensor(tensor)) for key, tensor in inner._parameters.items() if tensor is not None),
            tuple((key, _tensor(tensor)) for key, tensor in inner._buffers.items() if tensor is not None),
        )
        for name, inner in module.named_modules()
    )


def _settings(module: nn.Module) -> Hashable:
    """Its plain attributes. Of a fraction only whether it is 0 matters: a dropout's rate costs nothing."""
    return tuple(
        (name, value != 0 if isinstance(value, float) else value)
        for name, value in sorted(vars(module).items())
        if _is_plain(value) and not name.endswith(NUMBERS_OF_PLACES)
    )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str, torch.dtype))


def _tensor(tensor: Tensor) -> tuple[Any, ...]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad


def _plain(value: Any, numbers: Mapping[fx.Node, int]) -> Hashable:
    """Arguments as a hashable value: nodes by their numbers; what cannot be hashed is itself only."""
    match value:
        case fx.Node():
            return "node", numbers[value]
        case tuple() | list():
            return isinstance(value, tuple), tuple(_plain(item, numbers) for item in value)
        case dict():
            return "dict", tuple((key, _plain(item, numbers)) for key, item in value.items())
        case slice():
            return "slice", _plain((value.start, value.stop, value.step), numbers)
    try:
        hash(value)
    except TypeError:
        return "object", id(value)
    return type(value), value
