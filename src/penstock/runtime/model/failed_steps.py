"""Undoes what a step that raises has done to the model: gradients, tensors that forwards update, attributes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager

from torch import Tensor, nn

_PARTS = ("_buffers", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


@contextmanager
def undone_if_it_raises(
    modules: Iterable[nn.Module], parameters: Iterable[nn.Parameter], updated: Set[Tensor] | None, *, local: bool
) -> Iterator[None]:
    """Wraps a step. In several processes, where the run then ends, only gradients that were None are so again.

    Args:
        updated: what the step may update besides gradients; None in an evaluation, which updates nothing.
        local: whether one process drives all ranks.
    """
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    kept = {grad for _, grad in gradients if grad is not None}
    changing = updated | kept if local and updated is not None else ()
    copies = [(tensor.detach(), tensor.detach().clone()) for tensor in changing]
    held = [held for m in modules for held in (vars(m), *(vars(m).get(name, {}) for name in _PARTS))] if local else []
    attributes = [each.copy() for each in held]
    try:
        yield
    except BaseException as error:
        for each, before in zip(held, attributes, strict=True):
            each.clear()
            each.update(before)
        if kept and not local:
            error.add_note("penstock: gradients from before this step may hold part of it; call zero_grad()")
        for parameter, grad in gradients:
            if local or grad is None:
                parameter.grad = grad
        for tensor, copy in copies:
            tensor.copy_(copy)
        raise
