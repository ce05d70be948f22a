"""Values that follow from the program alone, such as position ids: kept real, so that the forward may branch on them.

Without this a library that asks "is this mask trivial?" would take another path than it takes in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from penstock.partition._compat import flatten, storage_of, unset_fake_temporarily
from penstock.partition.observer import Observer


class Restart(BaseException):
    """A real value was overwritten with an unknown one: record again with these calls on fake tensors.

    No Exception, so that the model's own `except` clauses do not take it.
    """

    def __init__(self, fake_calls: frozenset[int]) -> None:
        super().__init__()
        self.fake_calls = fake_calls


class Known:
    """Runs calls: for real where all their tensors are known, else on fake tensors.

    Args:
        observer: sees what each call draws and writes.
        fake_calls: numbers of calls whose results must not be known, since unknown values are written into them later.
    """

    def __init__(self, observer: Observer, fake_calls: frozenset[int]) -> None:
        self._observer, self._fake_calls = observer, fake_calls
        self._calls = 0
        self._real: dict[int, Tensor] = {}
        self._origins: dict[int, int] = {}  # storage of a real tensor -> number of the call that made it

    def run(
        self, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, list[nn.Module | None], frozenset[int]]:
        """The call's result, the modules in which it drew random numbers, and the memory that it wrote."""
        self._calls += 1
        given = [leaf for leaf in flatten((args, kwargs)).leaves if isinstance(leaf, Tensor)]
        self._observer.take()
        if all(id(t) in self._real for t in given) and self._calls not in self._fake_calls:
            with unset_fake_temporarily():
                result = function(*args, **kwargs)
            drew, writes = self._observer.take()
            if not drew:
                self._keep(result)
                return result, drew, writes
            self.refuse_writes(writes)  # what was drawn is not known: draw again, on fake tensors
        result = function(*args, **kwargs)
        drew, writes = self._observer.take()
        self.refuse_writes(writes)
        return result, drew, writes

    def refuse_writes(self, writes: frozenset[int]) -> None:
        """Raise Restart if real values were overwritten by something unknown."""
        stale = frozenset(self._origins[s] for s in writes if s in self._origins)
        if stale:
            raise Restart(self._fake_calls | stale)

    def _keep(self, result: Any) -> None:
        for leaf in flatten(result).leaves:
            if isinstance(leaf, Tensor):
                self._real[id(leaf)] = leaf
                self._origins.setdefault(storage_of(leaf), self._calls)
