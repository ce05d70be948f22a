"""What the forwards of a stage keep in Python objects and tensors, looked at before and after each of them.

Everything that the code of some modules reaches is found once; then a look costs little: no Python runs per attribute.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from penstock.partition.state.class_data import ClassData
from penstock.partition.state.library import is_library
from penstock.partition.state.places import Contents, Key, Place, Survey, stored_globals
from penstock.partition.state.reach import Trace
from penstock.runtime.features.attributes import Attributes, Held, Reading
from penstock.runtime.features.forward_state import roots_of
from penstock.runtime.features.tensor_state import TensorReading


@dataclass(frozen=True, slots=True)
class Look:
    """What was there before a forward.

    Attributes:
        attributes, others: what the places hold.
        versions: autograd's counts of the tensors' updates.
        tensors: the tensors themselves, small ones with their values; empty if these are not compared.
    """

    attributes: Reading
    others: Sequence[Any]
    versions: Sequence[int]
    tensors: Sequence[TensorReading]


class KeptState:
    """The places and tensors that the code of some modules reaches.

    Args:
        modules: a stage's.
        traces: other places to look at.
        passed_over: tensors that may change.
    """

    def __init__(self, modules: Collection[nn.Module], traces: Iterable[Trace], passed_over: Iterable[Tensor]) -> None:
        self._modules = modules
        self._passed_over = {id(tensor) for tensor in passed_over}
        bases = dict.fromkeys(base for module in modules for base in type(module).__mro__)
        kinds = [base for base in bases if not is_library(base.__module__)]
        self._traces = [*traces, *(Trace(data, name) for data in map(ClassData, kinds) for name in data)]
        self._traces += [Trace(known, name) for known, name in stored_globals(kinds)]
        self._roots = roots_of(module for module in modules if not isinstance(module, fx.GraphModule))
        self.find()

    def find(self) -> None:
        """Finds everything anew: forwards may have made objects, or put lists where there were none."""
        hooks = [
            hook for m in self._modules for held in (m._forward_hooks, m._forward_pre_hooks) for hook in held.values()
        ]
        survey = Survey([*self._roots, *hooks], self._traces)
        self.places: Mapping[Key, Place] = survey.places
        self._owners = survey  # keeps what holds the places alive
        self._attributes = Attributes(self._holders(survey))
        known = {id(held) for _, held, _ in self._holders(survey)}
        self._others = [place for place in survey.places.values() if place.key[0] not in known]
        tensors = {id(t): (name, t) for name, t in survey.tensors.values()}
        tensors |= {
            id(t): (name, t) for module in self._modules for name, t in module._buffers.items() if t is not None
        }
        self.tensors = [
            (name, tensor)
            for key, (name, tensor) in tensors.items()
            if key not in self._passed_over and not tensor.is_meta and not tensor.is_inference()
        ]

    def _holders(self, survey: Survey) -> Iterator[Held]:
        traced = {id(trace.holder) for trace in self._traces}
        for attributes in survey.attributes:
            yield "", attributes, True
        for module in self._modules:
            yield "", module._buffers, True
        for place in survey.places.values():
            if isinstance(place, Contents) and isinstance(place.container, dict) and place.key[0] not in traced:
                yield place.name, place.container, False

    def look(self, *, closely: bool) -> Look:
        """What is there now. `closely`: including the values of small tensors, into which code may write unseen by
        autograd."""
        return Look(
            self._attributes.read(),
            [place.read() for place in self._others],
            [tensor._version for _, tensor in self.tensors],
            [TensorReading.of(tensor) for _, tensor in self.tensors] if closely else (),
        )

    def written(self, before: Look) -> tuple[str, Tensor] | None:
        """A tensor that has been written to since, with its name."""
        for (name, tensor), version in zip(self.tensors, before.versions, strict=True):
            if tensor._version != version:
                return name, tensor
        for (name, tensor), reading in zip(self.tensors, before.tensors, strict=False):
            if not reading.fits(tensor):
                return name, tensor
        return None

    def set_since(self, before: Look, known: Collection[Key]) -> Mapping[Key, tuple[Place, Any]]:
        """The places set since, except known ones, each with its previous contents."""
        found = dict(self._attributes.set_since(before.attributes, known))
        for place, was in zip(self._others, before.others, strict=True):
            if place.key not in known and not place.holds(was):
                found[place.key] = place, was
        return found
