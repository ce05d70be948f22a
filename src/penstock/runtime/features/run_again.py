"""Runs a stage's forward again in another state, to see whether what it computes depends on that state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.partition.state.places import Key, Place, Values
from penstock.partition.values.memory import same_bits
from penstock.runtime.exact import rules as exact
from penstock.runtime.features.feature import Forward
from penstock.runtime.features.recomputed_layers import received


@dataclass(frozen=True, slots=True)
class Run:
    """A forward that has just run.

    Attributes:
        args, results: what it took and gave.
        versions: autograd's counts of their updates: of its arguments' before it ran, of its results' afterwards.
    """

    forward: Forward
    args: Sequence[Any]
    results: Sequence[Tensor]
    versions: Sequence[int]

    @classmethod
    def of(cls, forward: Forward, args: Sequence[Any], *, copies: bool) -> tuple[Sequence[Tensor], Run]:
        """The results of a forward, and the run. `copies`: in case one of its tensors is updated in place."""
        kept = [_given(arg) for arg in args] if copies else args
        before = _versions(kept)
        results = forward(*args)
        given = [result.detach().clone() for result in results] if copies else results
        return results, cls(forward, kept, given, [*before, *_versions(given)])

    @property
    def is_intact(self) -> bool:
        """Whether nothing has been updated in place, so that it can run again."""
        return [*_versions(self.args), *_versions(self.results)] == self.versions

    def gives_the_same(self) -> bool:
        """Whether it gives the same again. What it prints or logs appears once more."""
        try:
            results = self.forward(*map(_given, self.args))
        except Exception:
            return False  # it cannot run in this state
        return len(results) == len(self.results) and all(map(same_bits, results, self.results))

    def on_other_values(self) -> None:
        """Runs it with other arguments of the same shapes, for what that leaves."""
        with suppress(Exception):
            self.forward(*(_other(_given(arg)) for arg in self.args))


@contextmanager
def undone(
    places: Mapping[Key, Place], tensors: Iterable[Tensor], device: torch.device
) -> Iterator[Callable[[Values], None]]:
    """Meanwhile code may set places and update tensors; afterwards they are as before, as are the random generators of
    the CPU and the device.

    Yields:
        a function that restores everything, except that some places get other values.
    """
    tensors = list(tensors)
    held = {key: place.read() for key, place in places.items()}
    values = [tensor.detach().clone() for tensor in tensors]

    def put(others: Values) -> None:
        for key, value in {**held, **others}.items():
            places[key].write(value)
        for tensor, value in zip(tensors, values, strict=True):
            if not same_bits(tensor, value):
                tensor.data.copy_(value)

    with torch.random.fork_rng([device] if device.type == "cuda" else ()):
        try:
            yield put
        finally:
            put({})


def _versions(values: Iterable[Any]) -> list[int]:
    return [value._version for value in values if isinstance(value, Tensor)]


def _given(arg: Any) -> Any:
    return received(exact.copy_as(exact.Layout.of(arg), arg), arg.requires_grad) if isinstance(arg, Tensor) else arg


def _other(arg: Any) -> Any:
    if not isinstance(arg, Tensor):
        return arg
    return arg * 2 if arg.is_floating_point() or arg.is_complex() else arg.flip([0] if arg.dim() else [])
