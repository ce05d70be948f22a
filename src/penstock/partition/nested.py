"""The tensors in a value: inside tuples, lists, dicts and registered pytrees, and inside opaque objects.

Which classes can be taken apart and rebuilt, plain objects among them, is decided in `_base/pytree.py`.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import CodeType, EllipsisType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import Node

from penstock._base.compat import FakeTensor, FakeTensorMode
from penstock._base.pytree import LEAF, Flat, Leaf, TreeSpec, flatten, overwrite, unflatten

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


@dataclass(frozen=True, slots=True)
class Constant:
    """A leaf of a value that a stage's outputs make up which is none of them; one that is, is their index."""

    value: object


def fill_in(leaves: Iterable[Any], outputs: Sequence[Tensor]) -> list[Any]:
    """Return the leaves, each an index of `outputs` or a `Constant`."""
    return [leaf.value if isinstance(leaf, Constant) else outputs[leaf] for leaf in leaves]


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


# -- arguments that a call may change: caches, lists, dicts, plain objects ---------------------------------------------


class MutableArguments:
    """The containers among a call's arguments, as they are before the call.

    They are values: a stage rebuilds them for each call from the tensors that it has, and then extracts what the call
    left in them. So a cache that every block writes to crosses cuts like any other value.

    Attributes:
        containers: the outermost objects, lists and dicts.
    """

    def __init__(self, args: Any, kwargs: Any, model_objects: Collection[int] = ()) -> None:
        """`model_objects`: ids of what the model keeps between calls; what holds no tensor is passed on as it is."""
        self.containers = tuple(_outermost((*args, *kwargs.values())))
        self._model_objects = model_objects
        self._with_tensors, self._all_opened = self._state()

    def _state(self) -> tuple[Flat, Flat]:
        """Flatten all containers twice: with only the objects that hold tensors opened, and with all opened."""
        if not self.containers:
            return flatten(()), flatten(())
        return flatten(self.containers), flatten(self.containers, empty=True, closed=self._model_objects)

    def changed(self) -> list[int]:
        """Return which of the containers have changed."""
        if not self.containers:
            return []
        before, after = _by_container(self._all_opened), _by_container(self._state()[1])
        return [index for index, pair in enumerate(zip(before, after, strict=True)) if not _is_same(*pair)]

    def to_rebuild(self, changed: Collection[int]) -> tuple[list[int], Flat]:
        """Return which containers must be rebuilt for the call, and all containers as they were before it,
        flattened."""
        plans = self._with_tensors.structure.children  # type: ignore[attr-defined]
        indices = [index for index, plan in enumerate(plans) if index in changed or _holds_objects(plan)]
        return indices, self._all_opened if changed else self._with_tensors

    def write_back(self, changed: Collection[int], new: Any) -> None:
        """Give the containers the contents of those that went through a call in their place."""
        for index in changed:
            overwrite(self.containers[index], new[index])


def _outermost(values: Any) -> Iterator[Any]:
    """Yield each outermost object, list and dict that can be opened."""
    for value in values:
        if isinstance(value, Tensor) or type(value) in CONSTANTS:
            continue
        if type(value) is tuple:
            yield from _outermost(value)
        elif type(value) in (list, dict) or flatten(value, empty=True).structure != LEAF:
            yield value


def _by_container(flat: Flat) -> Iterator[tuple[TreeSpec, list[Any]]]:
    start = 0
    for plan in flat.structure.children:  # type: ignore[attr-defined]
        count = _count_leaves(plan)
        yield plan, flat.leaves[start : start + count]
        start += count


def _count_leaves(plan: TreeSpec) -> int:
    return 1 if plan.op == LEAF.op else sum(map(_count_leaves, plan.children))


def _is_same(first: tuple[Hashable, list[Any]], second: tuple[Hashable, list[Any]]) -> bool:
    """Whether two values, as structure and leaves, hold the same objects and equal constants."""
    if first[0] != second[0]:
        return False
    pairs = zip(first[1], second[1], strict=True)
    return all(a is b or (type(a) in CONSTANTS and type(a) is type(b) and a == b) for a, b in pairs)


def _holds_objects(plan: TreeSpec) -> bool:
    return plan.op in ("object", "known", "ref", "weak") or any(map(_holds_objects, plan.children))
