"""What code keeps besides its results: each rank has its own, as it would in a process, and so has the unsplit model.

One process that drives all ranks has one set of modules, globals and classes. Blocks that talk through them (a list in
a file, `self.other.seen`, a shared cache) would find each other there, and not where each rank is a process. So what
changed is put back as soon as another rank computes, and comes back with the rank that changed it. Parameters and
buffers stay where they are: what stages use of them is known.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from penstock.partition.run.loan import Snapshot
from penstock.partition.source import TORCH_ATTRIBUTES
from penstock.partition.state.reach import Holder
from penstock.verification.beside_reach import Place, held_by, places_beside, reach_of
from penstock.verification.twins import Made

RECORDING = "recording"
"""Owns what a recording between two steps leaves behind, such as a count in a class, which it does not put back."""

_WITH_HOOKS = TORCH_ATTRIBUTES | {"_output_capturing_hooks_installed"}
"""Attributes of modules that stay as they are, as hooks do: transformers notes so that a model's blocks have them."""


class States:
    """The states of a model and its loss, by owner, all of which begin as it was at first. At first, the owner is None.
    As a context, it leaves everything as it was.

    Attributes:
        home: the owner of what code outside of stages reads: the rank that has the loss.
    """

    home: Hashable = None

    def __init__(self, made: Made) -> None:
        self._reach = reach_of(made.model, made.loss)
        held = [made.loss, *made.model.modules(), *(v for place in self._reach.holders for v in held_by(place))]
        self._others = places_beside(held, (*made.model.parameters(), *made.model.buffers()))
        self._modules = Snapshot(made.model)
        self._states: dict[Hashable, list[tuple[Place, Any]]] = {}
        self._owner: Hashable = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        self._states.pop(None, None)
        self.enter(None)
        self._modules.restore()  # hooks, too, which go with attributes that say that they are there

    def enter(self, owner: Hashable) -> None:
        """Keep the present owner's state, and put that of another in place."""
        if owner == self._owner:
            return
        changed: list[Place] = [*self._reach.changed(), *(place for place in self._others if place.is_changed())]
        self._states[self._owner] = [(place, place.copied()) for place in changed]
        for place in changed:
            _put(place, place.before)
        for place, entries in self._states.pop(owner, ()):
            _put(place, entries)
        self._owner = owner


def _put(place: Place, entries: Any) -> None:
    """Replace what a place holds, but not a module's mode, hooks and registered parts, nor what compilers put in."""

    if isinstance(place, Holder) and place.attributes:
        kept = _WITH_HOOKS if place.module else ()
        stay = {key: value for key, value in place.entries.items() if key in kept or str(key).startswith("__")}
        entries = stay | {key: value for key, value in entries.items() if key not in stay}
    place.put(entries)
