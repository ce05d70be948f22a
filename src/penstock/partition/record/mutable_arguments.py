"""Arguments that a call may change: caches, lists, dicts, plain objects.

They are values: a stage rebuilds them for each call from the tensors that it has, and then extracts what the call left
in them. So a cache that every block writes to crosses cuts like any other value. What is written into a tensor in place
is in `operator_effects.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any

from torch import Tensor

from penstock._base.pytree import LEAF, Flat, TreeSpec, flatten, overwrite
from penstock.partition.nested import CONSTANTS


class MutableArguments:
    """The containers among a call's arguments, as they are before the call.

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
