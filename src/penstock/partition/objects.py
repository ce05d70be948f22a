"""What a value holds: tensors inside tuples, lists, dicts and registered pytrees, and inside opaque objects."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from types import EllipsisType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.partition._compat import FakeTensor, flatten

CONSTANTS = (
    *(type(None), bool, int, float, complex, str, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values a graph prints as they are."""


def leaf(value: Any, index: int) -> Any:
    """The leaf at `index` of a registered pytree."""
    return flatten(value).leaves[index]


def input_path(path: str) -> str:
    """The path of a leaf of (args, kwargs) as a caller would write it: `args[0]`, `kwargs['labels']`."""
    return path.replace("[0]", "args", 1) if path.startswith("[0]") else path.replace("[1]", "kwargs", 1)


def free_name(model: nn.Module, name: str) -> str:
    """The name, or with underscores behind it one that the model does not use."""
    while hasattr(model, name):
        name += "_"
    return name


def is_named_tuple(value: object) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def child_items(value: Any) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """For each part of a structure: a function, a key and the part, where function(value, key) gives the part."""
    if isinstance(value, Tensor) or type(value) in CONSTANTS:
        return
    if isinstance(value, (tuple, list)):
        for index, item in enumerate(value):
            yield operator.getitem, index, item
    elif isinstance(value, dict):
        for key, item in value.items():
            yield operator.getitem, key, item
    else:
        leaves = flatten(value).leaves
        if not (len(leaves) == 1 and leaves[0] is value):
            for index, item in enumerate(leaves):
                yield leaf, index, item


def holds_tensors(value: Any, fake_only: bool = False, depth: int = 4) -> bool:
    """Whether a value is or holds a tensor, looked for also in the attributes of opaque objects."""
    if isinstance(value, Tensor):
        return isinstance(value, FakeTensor) or not fake_only
    if type(value) in CONSTANTS or depth == 0:
        return False
    if isinstance(value, (tuple, list, set, frozenset)):
        return any(holds_tensors(v, fake_only, depth) for v in value)
    if isinstance(value, dict):
        return any(holds_tensors(v, fake_only, depth) for v in value.values())
    if isinstance(value, (type, nn.Module, FunctionType, ModuleType)):
        return False
    return any(holds_tensors(v, fake_only, depth - 1) for v in getattr(value, "__dict__", {}).values())


def tensors_in(value: Any, depth: int = 4) -> Iterator[Tensor]:
    """The tensors that a value is or holds, looked for also in slices and in the attributes of opaque objects."""
    if isinstance(value, Tensor):
        yield value
    elif type(value) in CONSTANTS or depth == 0 or isinstance(value, (type, nn.Module, FunctionType, ModuleType)):
        return
    elif isinstance(value, slice):
        yield from tensors_in((value.start, value.stop, value.step), depth)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item, depth)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item, depth)
    else:
        for item in getattr(value, "__dict__", {}).values():
            yield from tensors_in(item, depth - 1)


def opaque_holders(value: Any) -> Iterator[Any]:
    """The objects in a structure that hold fake tensors without being a structure themselves."""
    children = list(child_items(value))
    if not children and not isinstance(value, Tensor) and holds_tensors(value, fake_only=True):
        yield value
    for _, _, item in children:
        yield from opaque_holders(item)
