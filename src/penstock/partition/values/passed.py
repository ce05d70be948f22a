"""Objects, lists and dicts that are passed to a block: their state before the call, and whether the call changed them.

They are values: a stage rebuilds them for each call from the tensors that it has, and then extracts what the call left
in them. So a cache that every block writes to crosses cuts like any other value.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from typing import Any

from torch import Tensor, nn

from penstock._base.trees import LEAF, Flat, TreeSpec, flatten, overwrite
from penstock.partition.values.objects import CONSTANTS


class Passed:
    """The containers among a call's arguments, as they are before the call.

    Attributes:
        containers: the outermost objects, lists and dicts.
    """

    def __init__(self, args: Any, kwargs: Any, kept: Collection[int] = ()) -> None:
        """`kept`: ids of what the model keeps between calls; what holds no tensor is passed on as it is."""
        self.containers = tuple(_outermost((*args, *kwargs.values())))
        self._kept = kept
        self._shown, self._every = self._state()

    def _state(self) -> tuple[Flat, Flat]:
        """All containers, flattened twice: with only the objects that hold tensors opened, and with all opened."""
        if not self.containers:
            return flatten(()), flatten(())
        return flatten(self.containers), flatten(self.containers, empty=True, closed=self._kept)

    def changed(self) -> list[int]:
        """Which of the containers have changed."""
        if not self.containers:
            return []
        before, after = _by_container(self._every), _by_container(self._state()[1])
        return [index for index, pair in enumerate(zip(before, after, strict=True)) if not _alike(*pair)]

    def given(self, changed: Collection[int]) -> tuple[list[int], Flat]:
        """Which containers must be rebuilt for the call, and all containers as they were before it, flattened."""
        plans = self._shown.structure.children  # type: ignore[attr-defined]
        made = [index for index, plan in enumerate(plans) if index in changed or _holds_objects(plan)]
        return made, self._every if changed else self._shown

    def write_back(self, changed: Collection[int], new: Any) -> None:
        """Gives the containers the contents of those that went through a call in their place."""
        for index in changed:
            overwrite(self.containers[index], new[index])


def kept_by(model: nn.Module) -> dict[int, object]:
    """The modules' attributes other than tensors and constants, by id."""
    values = (value for module in model.modules() for value in vars(module).values())
    return {id(value): value for value in values if not isinstance(value, Tensor) and type(value) not in CONSTANTS}


def _outermost(values: Any) -> Iterator[Any]:
    """Each outermost object, list and dict that can be opened."""
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
        count = _leaves(plan)
        yield plan, flat.leaves[start : start + count]
        start += count


def _leaves(plan: TreeSpec) -> int:
    return 1 if plan.op == LEAF.op else sum(map(_leaves, plan.children))


def _alike(one: tuple[Hashable, list[Any]], other: tuple[Hashable, list[Any]]) -> bool:
    """Whether two values, as structure and leaves, hold the same objects and equal constants."""
    if one[0] != other[0]:
        return False
    pairs = zip(one[1], other[1], strict=True)
    return all(a is b or (type(a) in CONSTANTS and type(a) is type(b) and a == b) for a, b in pairs)


def _holds_objects(plan: TreeSpec) -> bool:
    return plan.op in ("object", "known", "ref", "weak") or any(map(_holds_objects, plan.children))
