"""The tensors in a value: inside tuples, lists, dicts and registered pytrees, and inside opaque objects.

Which classes can be taken apart and rebuilt, plain objects among them, is decided in `_base/pytree.py`.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from types import CodeType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from penstock._base.compat import FakeTensor, FakeTensorMode
from penstock._base.pytree import Leaf, flatten, unflatten

CONSTANTS = (
    *(type(None), bool, int, float, complex, str, EllipsisType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
"""Types whose values a graph can print."""

HIDDEN = 2000
"""How many objects to search inside one that cannot be taken apart."""


class NodeValue(Leaf):
    """Stands for the value of a node that is no tensor: a random number, say."""

    node: fx.Node


def leaf(value: Any, index: int) -> Any:
    """Return the leaf at `index` of a structure."""
    return flatten(value).leaves[index]


def rebuilt(structure: Any, *leaves: Any) -> Any:
    """Build a new object from a structure and leave, for the block that takes it."""
    return unflatten(leaves, structure)


def input_path(path: str) -> str:
    """Return the path of a leaf of (args, kwargs) as a caller would write it: `args[0]`, `kwargs['labels']`."""
    return path.replace("[0]", "args", 1) if path.startswith("[0]") else path.replace("[1]", "kwargs", 1)


def free_name(model: nn.Module, name: str) -> str:
    """Append underscores to the name until the model has no such attribute."""
    while hasattr(model, name):
        name += "_"
    return name


def is_named_tuple(value: object) -> bool:
    return type(value).__bases__ == (tuple,) and hasattr(value, "_fields")


def child_items(value: Any) -> Iterator[tuple[Callable[..., Any], Any, Any]]:
    """Yield, for each part of a structure, a function, a key and the part: `function(value, key)` returns the part."""
    if isinstance(value, Tensor) or type(value) in CONSTANTS:
        return
    if type(value) in (tuple, list) or is_named_tuple(value):
        for index, item in enumerate(value):
            yield operator.getitem, index, item
    elif type(value) is dict:
        for key, item in value.items():
            yield operator.getitem, key, item
    else:
        leaves = flatten(value).leaves
        if not (len(leaves) == 1 and leaves[0] is value):
            for index, item in enumerate(leaves):
                yield leaf, index, item


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value: those in its structure, and those in objects that cannot be taken apart.

    Leaves out those in closures, which are not part of a call's arguments.
    """
    for item in flatten(value).leaves:
        if isinstance(item, Tensor):
            yield item
        elif not isinstance(item, (FunctionType, MethodType, partial)):
            yield from hidden_tensors(item)


def holds_tensors(value: Any, fake_only: bool = False) -> bool:
    """Whether a value is or holds a tensor, even one that cannot be taken out."""
    return any(
        (isinstance(x, FakeTensor) or not fake_only) if isinstance(x, Tensor) else hides_tensors(x, fake_only)
        for x in flatten(value).leaves
    )


def hides_tensors(value: Any, fake_only: bool = False) -> bool:
    """Whether a leaf is an object that cannot be taken apart but refers to a tensor: a generator, a closure."""
    return any(isinstance(tensor, FakeTensor) or not fake_only for tensor in hidden_tensors(value))


def hidden_tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors that an object that cannot be taken apart refers to."""
    if type(value) in CONSTANTS:
        return
    stack, seen = [value], {id(value): value}
    while stack and len(seen) < HIDDEN:
        for item in _referents(stack.pop()):
            if isinstance(item, Tensor):
                yield item
            elif id(item) not in seen and type(item) not in CONSTANTS:
                seen[id(item)] = item
                stack.append(item)


def _referents(value: Any) -> Sequence[Any]:
    """Return what an object refers to, apart from modules, types and a function's globals, which are not part of a
    value."""
    if isinstance(value, (type, nn.Module, ModuleType, CodeType, FakeTensorMode)):
        return ()
    if isinstance(value, FunctionType):
        return (value.__closure__, value.__defaults__, value.__kwdefaults__, value.__dict__)
    return gc.get_referents(value)


def leaves_of(results: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors for which autograd would accumulate gradients from these results."""
    pending: list[Node] = [t.grad_fn for t in results if t.grad_fn is not None]
    leaves = [t for t in results if t.grad_fn is None and t.requires_grad]
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            leaves.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return leaves


def find_model_objects(model: nn.Module) -> dict[int, object]:
    """Return the modules' attributes other than tensors and constants, by id."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value for value in values if not isinstance(value, Tensor) and type(value) not in CONSTANTS}
