"""Loss functions of output and target, or of the output alone."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import update_wrapper
from typing import Any, cast

from torch import Tensor, nn

from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.trees import leaf_tensors
from penstock._base.words import in_a_line
from penstock.runtime.loss.loss import Loss


class OutputLoss:
    """A loss of the model's output alone, which needs no target."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        update_wrapper(self, function, updated=())
        self._function = function

    def __call__(self, output: Any, target: Any) -> Tensor:
        return self._function(output)


def checked_loss(loss: Loss | Callable[[Any], Tensor] | None) -> Loss | None:
    """The user's loss as a function of output and target.

    Raises:
        ArgumentError: it cannot be called with either one or two arguments.
    """
    if loss is None or isinstance(loss, OutputLoss):
        return loss
    if not callable(loss):
        raise ArgumentError(f"loss_fn={loss!r}: expected a function of the model's output and the target, or None")
    if isinstance(loss, type):
        raise ArgumentError(f"loss_fn={loss.__name__}: this is a class; pass an instance, {loss.__name__}(...)")
    function: Any = loss
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        signature = _BOTH  # functions written in C have no signature
    if _takes(signature, 2):
        return cast(Loss, function)
    if _takes(signature, 1):
        return OutputLoss(function)
    raise ArgumentError(
        f"loss_fn takes {signature}; expected loss_fn(output, target), or loss_fn(output) where no target is needed"
    )


def saying_what_is_missing(loss: Loss | None) -> Loss | None:
    """The loss, with a clear message if it raises because a step has no target, or none of tensors."""
    if loss is None or isinstance(loss, OutputLoss):
        return loss

    def call(output: Any, target: Any) -> Tensor:
        try:
            return loss(output, target)
        except Exception as error:
            if isinstance(error, PenstockError):
                raise
            if target is None:
                given = "target=None, but this rank runs the last stage, and loss_fn(output, None)"
                remedy = "pass target=... where pipe.needs_targets is true"
            elif isinstance(error, TypeError) and not leaf_tensors(target):
                given = f"target is of type {type(target).__name__}, and loss_fn"
                remedy = "if it expects a tensor, pass target=torch.from_numpy(target) (a list: torch.as_tensor)"
            else:
                raise
            raise ArgumentError(f"{given} raised {in_a_line(error)}; {remedy}") from error

    update_wrapper(call, loss, updated=())  # for code that inspects what the loss reads
    return call


_BOTH = inspect.signature(lambda output, target: None)


def _takes(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True
