"""Refuses what a backward adds up outside buffers, in a hook on a gradient or in an autograd function, if a stage has
copies: a count of its calls, a sum in a tensor of its own.

Backwards of a stage run in order, so each finds there what it would on one device. But each copy of a stage runs only
some of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.state.library import OF_TORCH
from penstock.runtime.features.context import StageContext
from penstock.runtime.features.feature import Feature

LOOKS = 3
"""How many of a stage's forwards and backwards are watched; later ones behave alike."""

Counts = dict[tuple[int, str], tuple[object, int]]


class BackwardCounts(Feature):
    """Refuses changes to whole numbers and tensors in attributes by the backward of a stage with several copies.

    Other attributes are left alone: hooks may note there what they find, for the user to look at.

    Args:
        index: the stage's index.
        modules: the modules whose code the stage runs.
    """

    @classmethod
    def of(cls, stage: StageContext) -> BackwardCounts | None:
        """In training, if the stage has copies."""
        return cls(stage.index, stage.modules()) if stage.training and stage.copies else None

    def __init__(self, index: int, modules: Iterable[nn.Module]) -> None:
        self._index = index
        self._modules = list(dict.fromkeys(modules))
        self._of_forwards: set[tuple[int, str]] = set()
        self._forwards = self._backwards = 0

    @contextmanager
    def forward(self, microbatch: int, *, runs_again: bool) -> Iterator[None]:
        """Wraps a forward: whatever it changes, a forward that runs again in backward may change too."""
        self._forwards += 1
        before = self._values() if self._forwards <= LOOKS else {}
        yield
        if before:
            self._of_forwards |= self._changed(before)

    @contextmanager
    def autograd(self, microbatch: int) -> Iterator[None]:
        """Wraps autograd's backward. Raises PartitionError if it changes something that no forward changes."""
        self._backwards += 1
        before = self._values() if self._backwards <= LOOKS else {}
        yield
        for number, name in sorted(self._changed(before) - self._of_forwards) if before else ():
            raise PartitionError(
                f"the backward of stage {self._index} changes {name!r} of a {type(self._modules[number]).__name__} (in "
                "a hook or an autograd function), but this schedule runs several copies of the stage, each of which "
                "would see only part of the batch; use a schedule with one copy (dualpipe-v for dualpipe)"
            )

    def _changed(self, before: Counts) -> set[tuple[int, str]]:
        now = self._values()
        return {key for key, (held, value) in before.items() if key in now and _differs(now[key], held, value)}

    def _values(self) -> Counts:
        found: Counts = {}
        for number, module in enumerate(self._modules):
            for name, value in vars(module).items():
                if type(value) is int and name not in OF_TORCH:
                    found[number, name] = (None, value)
                elif isinstance(value, Tensor) and not value.is_inference():
                    found[number, name] = (value, value._version)
        return found


def _differs(now: tuple[object, int], held: object, value: int) -> bool:
    """Whether a number has changed, or the same tensor was updated in place."""
    return now[0] is held and now[1] != value
