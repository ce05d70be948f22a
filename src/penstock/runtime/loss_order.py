"""A loss that keeps state from one call to the next: a moving average in a buffer, a count of its calls.

On one device it is called in order of microbatch. Most schedules call it so; but of two copies of the last stage each
calls it for a part of the batch, and a schedule of a user's own may take any order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from penstock.errors import ArgumentError
from penstock.partition.state.cells import contents
from penstock.partition.state.library import OF_TORCH


class LossState:
    """What the modules of a loss hold: buffers, other tensors, and whole numbers, which count.

    Other attributes are left alone: a loss may note there what it has found, for others to look at.

    Args:
        pipelines: so many copies of the last stage call it.
    """

    def __init__(self, loss: Callable[..., Any] | None, pipelines: int) -> None:
        self._modules = [module for root in _roots(loss, 3) for module in root.modules()]
        self._pipelines = pipelines

    @contextmanager
    def in_order(self, losses: Sequence[Tensor | None], microbatch: int) -> Iterator[None]:
        """Around a call of the loss for a microbatch, after those for others. Raises ArgumentError if it has changed,
        and should have been called for others before."""
        if not self._modules or (self._pipelines == 1 and None not in losses[:microbatch]):
            yield
            return
        before = self._now()
        yield
        for (number, name), held in self._now().items():
            was = before.get((number, name))
            if was is not None and not (was[0] is held[0] and was[1] == held[1]):
                raise self._refusal(type(self._modules[number]).__name__, name)

    def _now(self) -> dict[tuple[int, str], tuple[object, int]]:
        found: dict[tuple[int, str], tuple[object, int]] = {}
        for number, module in enumerate(self._modules):
            for name, buffer in module._buffers.items():
                found[number, name] = (buffer, 0 if buffer is None else buffer._version)
            for name, value in vars(module).items():
                if type(value) is int and name not in OF_TORCH:
                    found[number, name] = (None, value)
                elif isinstance(value, Tensor):
                    found[number, name] = (None, value._version)
        return found

    def _refusal(self, kind: str, name: str) -> ArgumentError:
        why = (
            f"this schedule has {self._pipelines} copies of the last stage, each of which calls it for a part of the "
            "batch only; take a schedule with one copy (dualpipe-v for dualpipe)"
            if self._pipelines > 1
            else "this schedule does not call it in order of microbatch; take one that does (1f1b, gpipe)"
        )
        return ArgumentError(
            f"loss: each call of {kind} updates its {name!r}, so that it matters in which order it is called, and {why}"
        )


def _roots(value: Any, depth: int) -> Iterator[nn.Module]:
    """The modules that a loss consists of, or names."""
    if isinstance(value, nn.Module):
        yield value
        return
    if depth == 0:
        return
    parts: list[Any] = [getattr(value, "__wrapped__", None)]
    if isinstance(value, MethodType):
        parts += [value.__self__, value.__func__]
    elif isinstance(value, partial):
        parts += [value.func, *value.args, *value.keywords.values()]
    elif isinstance(value, FunctionType):
        parts += [
            *map(contents, value.__closure__ or ()),
            *(value.__globals__.get(name) for name in value.__code__.co_names),
        ]
    for part in parts:
        if part is not None:
            yield from _roots(part, depth - 1)
