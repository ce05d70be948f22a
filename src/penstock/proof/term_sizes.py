"""How large the terms are that backwards add up to a gradient, and the sums on the way.

If they are added in another order, as for a parameter that several stages hold, the sum may differ by rounding of the
terms: terms of 1e-2 that cancel, like those of a triplet loss in the last bias, leave a sum that is pure rounding, and
no tolerance based on the sum alone would hold. Likewise if each is added without being rounded first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


class TermSizes:
    """Sums of the terms' sizes, entry by entry, in float64.

    Args:
        tensors: parameters, and buffers that require a gradient, by name.
        by_use: the tensors for which each use in the forward makes its own term; for the rest, each backward makes one.
    """

    def __init__(self, tensors: Mapping[str, Tensor], by_use: Collection[str]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self._by_use = {id(tensor): name for name, tensor in self._tensors.items() if name in by_use}
        self._backwards: dict[str, Tensor] = {}
        self._uses: dict[str, Tensor] = {}

    @contextmanager
    def measuring(self) -> Iterator[dict[str, Tensor]]:
        """Wraps the forwards and backwards of one step; the yielded dict is filled at the end."""
        self._backwards, self._uses = {}, {}
        found: dict[str, Tensor] = {}
        hooks = [
            tensor.register_hook(partial(_add, self._backwards, name))  # type: ignore[no-untyped-call]
            for name, tensor in self._tensors.items()
        ]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()
        for name, size in self._backwards.items():
            # A use in a separate backward (a reentrant checkpoint) is not found in the graph: the larger one holds.
            found[name] = torch.maximum(size, self._uses.get(name, size))

    def watch(self, root: Tensor) -> None:
        """Call this before a backward from `root`: watches what each use of a parameter will contribute."""
        if not self._by_use or root.grad_fn is None:
            return
        seen, todo = {root.grad_fn}, [root.grad_fn]
        while todo:
            node = todo.pop()
            uses = [(place, self._used(after)) for place, (after, _) in enumerate(node.next_functions)]
            named = [(place, name) for place, name in uses if name is not None]
            if named:
                node.register_hook(_noting(self._uses, named))
            new = {after for after, _ in node.next_functions if after is not None} - seen
            seen |= new
            todo.extend(new)

    def _used(self, node: Node | None) -> str | None:
        """The tensor whose gradient a node accumulates, if it is one of ours."""
        return self._by_use.get(id(getattr(node, "variable", None)))


@contextmanager
def measuring_roundings(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Wraps the backwards of one step; fills the yielded dict with the sizes of all that adding up a gradient rounds.

    For each entry, in float64, that is the sum of |term| and |sum so far|, over all terms that are added to others. Two
    sums of the same terms, of which one rounds each term before it adds it, are apart by at most the dtype's epsilon
    times that: each rounding is off by half an epsilon, and each sum so far is rounded in both.
    """
    sums: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}

    def note(name: str, term: Tensor) -> None:
        value = _dense(term).double().cpu()
        if name in sums:
            sums[name] += value
            found[name] += value.abs() + sums[name].abs()
        else:
            sums[name], found[name] = value, torch.zeros_like(value)

    hooks = [tensor.register_hook(partial(note, name)) for name, tensor in tensors.items()]  # type: ignore[no-untyped-call]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


def _noting(sums: dict[str, Tensor], uses: Collection[tuple[int, str]]) -> Callable[[Any, Any], None]:
    def note(gradients: tuple[Tensor | None, ...], _: Any) -> None:
        for place, name in uses:
            _add(sums, name, gradients[place])

    return note


def _add(sums: dict[str, Tensor], name: str, term: Tensor | None) -> None:
    if term is not None:
        size = _dense(term).abs().double().cpu()
        sums[name] = sums[name] + size if name in sums else size


def _dense(term: Tensor) -> Tensor:
    return term.detach() if term.layout == torch.strided else term.detach().to_dense()
