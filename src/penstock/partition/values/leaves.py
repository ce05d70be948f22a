"""Finds the tensors that a result's gradients would reach."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import Node


def leaves_of(results: Iterable[Tensor]) -> list[Tensor]:
    """The tensors for which autograd would accumulate gradients from these results."""
    pending: list[Node] = [t.grad_fn for t in results if t.grad_fn is not None]
    found = [t for t in results if t.grad_fn is None and t.requires_grad]
    seen = set(pending)
    while pending:
        node = pending.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found.append(variable)
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                pending.append(following)
    return found
