"""Bounds on the rounding of gradients: the sizes of the terms that backwards add, and of the partial sums.

If they are added in another order, as for a parameter that several stages hold, the sum may differ by rounding of the
terms: terms of 1e-2 that cancel, like those of a triplet loss in the last bias, leave a sum that is pure rounding, and
no tolerance based on the sum alone would hold. Likewise if each is added without being rounded first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

Sums = dict[Any, Tensor]


class RoundingBounds:
    """Measures the sizes of gradients' terms, entry by entry, in float64; they bound rounding.

    Args:
        tensors: parameters, and buffers that require a gradient, by name.
        by_use: the tensors for which each use in the forward makes its own term; for the rest, each backward makes one.
        rounding: those of which `rounded` is measured.

    Attributes:
        uses: for each of `by_use`, the sum of each use's terms; the last use comes first.
        rounded: the sum of |term| and |sum so far|, over all terms that are added to others. Two sums of the same
            terms, of which one rounds each term before it adds it, are apart by at most the dtype's epsilon times that:
            each rounding is off by half an epsilon, and each sum so far is rounded in both.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], by_use: Collection[str] = (), rounding: Collection[str] = ()
    ) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if tensor.requires_grad}
        self._by_use = {id(tensor): name for name, tensor in self._tensors.items() if name in by_use}
        self._rounding = rounding

    @contextmanager
    def measuring(self) -> Iterator[Sums]:
        """Wrap the forwards and backwards of one step; the yielded sums of |term| are filled in at the end."""
        self.uses: dict[str, Sums] = {name: {} for name in self._by_use.values()}
        self.rounded, self._sizes, self._use_sizes, self._sums, largest = Sums(), Sums(), Sums(), Sums(), Sums()
        hooks: list[Any] = [t.register_hook(partial(self._add_term, n)) for n, t in self._tensors.items()]  # type: ignore[no-untyped-call]
        try:
            yield largest
        finally:
            for hook in hooks:
                hook.remove()
        for name, size in self._sizes.items():
            # A use in a separate backward (a reentrant checkpoint) is not found in the graph: the larger one holds.
            largest[name] = torch.maximum(size, self._use_sizes.get(name, size))

    def watch(self, root: Tensor) -> None:
        """Call this before a backward from `root`: watches what each use of a parameter will contribute."""
        nodes = [root.grad_fn] if self._by_use and root.grad_fn is not None else []
        visited, counts = {*nodes}, Counter[str]()
        for node in nodes:
            for position, (next_node, _) in enumerate(node.next_functions):
                name = self._by_use.get(id(getattr(next_node, "variable", None)))
                if name is not None:
                    node.register_hook(partial(self._add_use, name, counts[name], position))
                    counts[name] += 1
                elif next_node is not None and next_node not in visited:
                    visited.add(next_node)
                    nodes.append(next_node)

    def _add_term(self, name: str, term: Tensor) -> None:
        value = _to_double(term)
        _add(self._sizes, name, value.abs())
        if name in self._rounding:
            is_first = name not in self._sums
            _add(self._sums, name, value)
            _add(self.rounded, name, value * 0 if is_first else value.abs() + self._sums[name].abs())

    def _add_use(self, name: str, use: int, position: int, gradients: tuple[Tensor | None, ...], _: Any) -> None:
        if (term := gradients[position]) is not None:
            _add(self._use_sizes, name, _to_double(term).abs())
            _add(self.uses[name], use, _to_double(term))


def _add(sums: Sums, key: str | int, value: Tensor) -> None:
    sums[key] = sums[key] + value if key in sums else value


def _to_double(term: Tensor) -> Tensor:
    return (term.detach() if term.layout == torch.strided else term.detach().to_dense()).double().cpu()
