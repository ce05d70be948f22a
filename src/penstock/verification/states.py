"""State that code keeps besides its results, separately for each rank, as in processes, and for the unsplit model.

One process that drives all ranks has one set of modules, globals and classes. Blocks that talk through them (a list in
a file, `self.other.seen`, a shared cache) would find each other there, and not where each rank is a process. So what
changed is put back as soon as another rank computes, and comes back with the rank that changed it. Parameters and
buffers stay where they are: what stages use of them is known.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from types import CellType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.closures import EMPTY, contents
from penstock.partition.record.fakes import Snapshot
from penstock.partition.state.reachable import Holder, Reach
from penstock.partition.user_code import TORCH_ATTRIBUTES, is_library

RECORDING = "recording"
"""The owner of what a recording between two steps changes and does not restore, such as a count in a class."""

_WITH_HOOKS = TORCH_ATTRIBUTES | {"_output_capturing_hooks_installed"}
"""Attributes of modules that stay as they are, as hooks do: transformers notes so that a model's blocks have them."""

LARGEST_TENSOR = 2**20
"""In bytes; larger tensors are taken for data."""


class States:
    """The states of a model and its loss, by owner; all begin with the initial one. At first, the owner is None.
    As a context, it restores the initial state.

    Attributes:
        home: the owner whose state code outside of stages reads: the rank that has the loss.
    """

    home: Hashable = None

    def __init__(self, model: nn.Module, loss: Any) -> None:
        self._reach = build_reach(model, loss)
        values = [loss, *model.modules(), *(v for h in self._reach.holders for v in initial_values(h))]
        self._hidden = find_hidden_state(values, (*model.parameters(), *model.buffers()))
        self._modules = Snapshot(model)
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


# -- what `Reach` does not follow: attributes of classes, variables around functions, and values of tensors -----------


def find_hidden_state(values: Sequence[Any], excluded: Iterable[Tensor]) -> list[StateHolder]:
    """Return the state behind `values`, the objects that a model reaches, except the tensors in `excluded`."""
    classes = {value if isinstance(value, type) else type(value) for value in values}
    own_classes = {base for kind in classes for base in kind.__mro__ if not is_library(base.__module__)}
    cells = _cells([*values, *(value for base in own_classes for value in vars(base).values())])
    excluded_ids = {id(tensor) for tensor in excluded}
    candidates = (tensor for value in (*values, *map(contents, cells.values())) for tensor in _small_tensors(value))
    by_id = {id(tensor): tensor for tensor in candidates if id(tensor) not in excluded_ids}
    return [*map(_Variable, cells.values()), *map(_Attributes, own_classes), *map(_Values, by_id.values())]


class _Variable:
    """A closure variable."""

    def __init__(self, cell: CellType) -> None:
        self._cell, self.before = cell, contents(cell)

    def copied(self) -> Any:
        return contents(self._cell)

    def is_changed(self) -> bool:
        return self.copied() is not self.before

    def put(self, entries: Any) -> None:
        if entries is not EMPTY:
            self._cell.cell_contents = entries
        elif self.copied() is not EMPTY:
            del self._cell.cell_contents


class _Attributes:
    """The attributes of a class."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.before = self.copied()

    def copied(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self._kind).items() if not key.startswith("__")}

    def is_changed(self) -> bool:
        new = self.copied()
        return new.keys() != self.before.keys() or any(value is not self.before[key] for key, value in new.items())

    def put(self, entries: dict[str, Any]) -> None:
        new = self.copied()
        for key in new.keys() - entries.keys():
            delattr(self._kind, key)
        for key, value in entries.items():
            if new.get(key, EMPTY) is not value:
                setattr(self._kind, key, value)


class _Values:
    """A tensor's values. They are restored without a new version, since graphs that saved it belong to its owner."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._version, self.before = tensor, tensor._version, tensor.detach().clone()

    def copied(self) -> Tensor:
        return self._tensor.detach().clone()

    def is_changed(self) -> bool:
        return self._tensor._version != self._version

    def put(self, entries: Tensor) -> None:
        self._tensor.data.copy_(entries)
        self._version = self._tensor._version if entries is self.before else -1


StateHolder = Holder | _Variable | _Attributes | _Values
"""An object that holds state. `before`: its initial contents."""


def _cells(values: Iterable[Any]) -> dict[int, CellType]:
    """Return the closure variables of functions, and of functions in these variables."""
    cells_by_id: dict[int, CellType] = {}
    pending = [*values]
    while pending:
        value = pending.pop()
        if isinstance(value, MethodType):  # no getattr: MONAI's stand-ins for missing modules raise ImportError for any
            value = value.__func__
        cells = (value.__closure__ or ()) if isinstance(value, FunctionType) else ()
        new = {id(cell): cell for cell in cells if id(cell) not in cells_by_id}
        cells_by_id |= new
        pending += map(contents, new.values())
    return cells_by_id


def _small_tensors(value: Any) -> Iterator[Tensor]:
    """Yield a value that is a plain tensor, or a module's tensors, without large ones, such as data sets."""
    tensors = (*value.parameters(), *value.buffers()) if isinstance(value, nn.Module) else (value,)
    for tensor in tensors:
        plain = isinstance(tensor, Tensor) and tensor.is_leaf and tensor.layout == torch.strided and not tensor.is_meta
        if plain and (tensor.requires_grad or tensor.nbytes <= LARGEST_TENSOR):
            yield tensor


def build_reach(model: nn.Module, loss: Any) -> Reach:
    """Return all that a model and its loss can reach."""
    root = nn.Module()
    root.model = model
    root.loss = loss
    return Reach(root)


def initial_values(holder: Holder) -> Iterator[Any]:
    """Yield the initial contents of a holder."""
    entries = holder.before
    if isinstance(entries, dict):
        yield from entries.values()
    else:
        yield from entries if isinstance(entries, (list, deque)) else (entries,)
