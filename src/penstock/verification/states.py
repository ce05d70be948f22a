"""State that code keeps besides its results, separately for each rank, as in processes, and for the unsplit model.

One process that drives all ranks has one set of modules, globals and classes. Blocks that talk through them (a list in
a file, `self.other.seen`, a shared cache) would find each other there, and not where each rank is a process. So what
changed is put back as soon as another rank computes, and comes back with the rank that changed it. Parameters and
buffers stay where they are: what stages use of them is known.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from penstock.partition.record.fakes import Snapshot
from penstock.partition.state.reachable import Holder
from penstock.partition.user_code import TORCH_ATTRIBUTES
from penstock.verification.hidden_state import StateHolder, build_reach, find_hidden_state, initial_values
from penstock.verification.reference_copy import ModelAndLoss

RECORDING = "recording"
"""The owner of what a recording between two steps changes and does not restore, such as a count in a class."""

_WITH_HOOKS = TORCH_ATTRIBUTES | {"_output_capturing_hooks_installed"}
"""Attributes of modules that stay as they are, as hooks do: transformers notes so that a model's blocks have them."""


class States:
    """The states of a model and its loss, by owner; all begin with the initial one. At first, the owner is None.
    As a context, it restores the initial state.

    Attributes:
        home: the owner whose state code outside of stages reads: the rank that has the loss.
    """

    home: Hashable = None

    def __init__(self, pair: ModelAndLoss) -> None:
        self._reach = build_reach(pair.model, pair.loss)
        values = [pair.loss, *pair.model.modules(), *(v for h in self._reach.holders for v in initial_values(h))]
        self._hidden = find_hidden_state(values, (*pair.model.parameters(), *pair.model.buffers()))
        self._modules = Snapshot(pair.model)
        self._states: dict[Hashable, list[tuple[StateHolder, Any]]] = {}
        self._owner: Hashable = None

    def __enter__(self) -> States:
        return self

    def __exit__(self, *_: object) -> None:
        self._states.pop(None, None)
        self.enter(None)
        self._modules.restore()  # hooks, too, which go with attributes that say that they are there

    def enter(self, owner: Hashable) -> None:
        """Save the present owner's state, and restore that of another."""
        if owner == self._owner:
            return
        changed: list[StateHolder] = [*self._reach.changed(), *(h for h in self._hidden if h.is_changed())]
        self._states[self._owner] = [(holder, holder.copied()) for holder in changed]
        for holder in changed:
            _put(holder, holder.before)
        for holder, entries in self._states.pop(owner, ()):
            _put(holder, entries)
        self._owner = owner


def _put(holder: StateHolder, entries: Any) -> None:
    """Replace a holder's contents, but not a module's mode, hooks and registered parts, nor entries of compilers."""

    if isinstance(holder, Holder) and holder.attributes:
        keep = _WITH_HOOKS if holder.module else ()
        preserved = {key: value for key, value in holder.entries.items() if key in keep or str(key).startswith("__")}
        entries = preserved | {key: value for key, value in entries.items() if key not in preserved}
    holder.put(entries)
