"""Keeps the attributes that a module's forward sets for its own backward.

A reversible block notes the state of the random generators, so that it draws the same numbers when it runs itself again
in backward (reformer-pytorch's `Deterministic`, `attention_seed` in transformers' Reformer). In plain training a
microbatch's backward directly follows its forward; in a pipeline other forwards may run between the two and overwrite
what was noted. So whatever a forward sets is kept per microbatch, and restored for its backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any

from torch import nn

from penstock.partition.user_code import TORCH_ATTRIBUTES
from penstock.runtime.features.feature import NOTHING, Context, Feature, StageContext, Start
from penstock.schedule import Op

MISSING = object()
"""The value of an attribute that is not set."""

Attribute = tuple[int, str]
"""A module, by its position among the stage's, and a name."""

Values = dict[Attribute, Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The attributes before and after a microbatch's forward."""

    before: Values
    after: Values


class ForwardAttributes(Feature):
    """The attributes that the modules of one stage hold between forward and backward.

    It learns which ones a forward sets in its first step, and in the first forward of each later one.

    Args:
        modules: the stage's.
        splits: the microbatches whose backward ends with W.
    """

    @classmethod
    def of(cls, stage: StageContext) -> ForwardAttributes | None:
        """Build the feature in training, also under `compile=`: wherever the compiler breaks its graph, Python runs
        each time."""
        return cls(stage.modules(), stage.microbatches(Op.W)) if stage.training else None

    def __init__(self, modules: Iterable[nn.Module], splits: Iterable[int] = ()) -> None:
        self._modules = [vars(module) for module in modules]
        self._splits = frozenset(splits)
        self._known: dict[Attribute, None] = {}
        self._saved: dict[int, Snapshot] = {}
        self._learning = True
        self._is_first = True  # whether it is in its first step
        self._latest = -1  # the microbatch of the last forward

    def begin_step(self, start: Start) -> None:
        """Drop anything left by a step that raised."""
        self._saved.clear()
        self._is_first, self._learning = self._latest < 0, True

    def forward(self, microbatch: int, *, runs_again: bool) -> Context:
        """Wrap a forward: keep what it sets."""
        return self._recording(microbatch) if self._learning or self._known else NOTHING

    @contextmanager
    def _recording(self, microbatch: int) -> Iterator[None]:
        snapshots = [attributes.copy() for attributes in self._modules] if self._learning else ()
        before = self._current()
        yield
        self._latest = microbatch
        new = {key: value for key, value in self._set_since(snapshots) if key not in self._known}
        self._known |= dict.fromkeys(new)
        for saved in (*self._saved.values(), Snapshot(before, {})):  # earlier forwards left them as this one found them
            saved.before.update(new)
            saved.after.update(new)
        self._saved[microbatch] = Snapshot(before, self._current())
        self._learning = self._is_first

    def _set_since(self, before: Sequence[dict[str, Any]]) -> Iterator[tuple[Attribute, Any]]:
        """Yield the attributes that have been set, each with its previous value."""
        for position, old in enumerate(before):
            new = self._modules[position]
            if new.keys() == old.keys() and all(map(is_, new.values(), old.values())):
                continue
            for name in (old | new).keys() - TORCH_ATTRIBUTES:
                if new.get(name, MISSING) is not old.get(name, MISSING):
                    yield (position, name), old.get(name, MISSING)

    def backward(self, microbatch: int) -> Context:
        """Wrap a backward: restore what its forward set."""
        return self._restoring(microbatch, ends=microbatch not in self._splits) if self._known else NOTHING

    def weights(self, microbatch: int) -> Context:
        """Wrap W, in which hooks on the gradients of parameters run: restore what the I part left."""
        return self._restoring(microbatch, ends=True) if self._known else NOTHING

    @contextmanager
    def again(self, microbatch: int) -> Iterator[None]:
        """Wrap the stage's forward when it runs again within a backward: restore what it found the first time."""
        if microbatch in self._saved:
            self._set(self._saved[microbatch].before)
        yield

    @contextmanager
    def _restoring(self, microbatch: int, *, ends: bool) -> Iterator[None]:
        current, saved = self._current(), self._saved.get(microbatch)
        if saved is None:
            yield
            return
        self._set(saved.after)
        try:
            yield
        finally:
            self._saved[microbatch] = Snapshot(saved.before, self._current())
            if ends:
                del self._saved[microbatch]
            if microbatch != self._latest:  # otherwise a backward has left what plain torch leaves
                self._set(current)

    def _current(self) -> Values:
        return {(position, name): self._modules[position].get(name, MISSING) for position, name in self._known}

    def _set(self, values: Values) -> None:
        for (position, name), value in values.items():
            if value is MISSING:
                self._modules[position].pop(name, None)
            else:
                self._modules[position][name] = value
