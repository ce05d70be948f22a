"""Detects changes to the model between two steps: a block's flag was switched, a hook was added to a module.

Blocks run their own Python in every step. After a change, features learn again what they learned from the first steps.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from itertools import chain, count, islice, repeat
from typing import Any

from torch import Tensor, nn

_PARTS = ("_buffers", "_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_NUMBERS = (int, float)


class Touched:
    """Attributes and hooks of some modules, from the end of one step to the beginning of the next.

    Each value of a flag counts once, so flags that alternate or change in every step soon stop counting. Numbers count
    only as zero or nonzero, and other objects only by their class.

    Attributes:
        changes: how often something new was found, or a step raised.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._held = [held for m in self._modules for held in (vars(m), *(vars(m).get(name, {}) for name in _PARTS))]
        self._seen: set[tuple[tuple[int, Any], Any]] = set()
        self.changes = 0
        self.settle()

    def settle(self) -> None:
        """Called at the end of a step."""
        self._latest = self._now()

    def look(self) -> int:
        """Called before a step. Returns `changes`, including those since the last step."""
        latest, self._latest = self._latest, self._now()
        (lengths, _, values), (before_lengths, _, before_values) = self._latest, latest
        if lengths != before_lengths or not all(map(operator.is_, values, before_values)):
            before, now = _by_place(*latest), _by_place(*self._latest)
            new = {
                (place, _kind(value))
                for place, value in now.items()
                if place[1] != "training" and _kind(value) != _kind(before.get(place, _MISSING))
            }
            self.changes += not new <= self._seen
            self._seen |= new
        return self.changes

    @contextmanager
    def restoring(
        self, parameters: Iterable[nn.Parameter], updated: Set[Tensor] | None, *, local: bool
    ) -> Iterator[None]:
        """Wraps a step. One that raises leaves the model as it was: gradients, tensors that forwards update,
        attributes. In several processes, where the run then ends, only gradients that were None are so again.

        Args:
            updated: what the step may update besides gradients; None in an evaluation, which updates nothing.
            local: whether one process drives all ranks.
        """
        gradients = [(parameter, parameter.grad) for parameter in parameters]
        kept = {grad for _, grad in gradients if grad is not None}
        changing = updated | kept if local and updated is not None else ()
        copies = [(tensor.detach(), tensor.detach().clone()) for tensor in changing]
        try:
            yield
        except BaseException as error:
            self.changes += 1
            if local:
                self._restore_attributes()
            elif kept:
                error.add_note("penstock: gradients from before this step may hold part of it; call zero_grad()")
            for parameter, grad in gradients:
                if local or grad is None:
                    parameter.grad = grad
            for tensor, copy in copies:
                tensor.copy_(copy)
            raise

    def _restore_attributes(self) -> None:
        lengths, *found = self._latest
        items = zip(*found, strict=True)
        for held, length in zip(self._held, lengths, strict=True):
            before = dict(islice(items, length))
            held.clear()
            held.update(before)

    def _now(self) -> tuple[list[int], list[Any], list[Any]]:
        held = self._held
        return [*map(len, held)], [*chain.from_iterable(held)], [*chain.from_iterable(map(dict.values, held))]


_MISSING = object()


def _by_place(lengths: Iterable[int], keys: Iterable[Any], values: Iterable[Any]) -> dict[tuple[int, Any], Any]:
    holders = chain.from_iterable(map(repeat, count(), lengths))
    return dict(zip(zip(holders, keys, strict=True), values, strict=True))


def _kind(value: Any) -> Any:
    """The aspect of a value that may make code take another path."""
    if type(value) in _NUMBERS:
        return bool(value)
    return value if value is None or isinstance(value, (bool, str)) else type(value)
