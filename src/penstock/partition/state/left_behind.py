"""What a forward leaves behind besides its result, for the loss function to read: `layer.l_aux`, a list of losses.

Stages do not leave it: a value that was recorded call by call is not stored in any attribute, and another stage's
modules are in another process. So small values that require a gradient travel to the last stage as extra outputs, and
are put in their places while the loss function runs. All other values are replaced by something that raises when used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PartitionError
from penstock.partition.state.provenance import Provenance
from penstock.partition.state.reach import Holder, Reach, is_below
from penstock.partition.units.units import Grain, Learned, Unit
from penstock.partition.values.objects import CONSTANTS, tensors_in

SMALL = 1024
"""The most elements that a value may have to be carried to the last stage in case the loss function reads it."""


EVERY = "*"
"""If this is among the names of shut units, nothing is carried at all."""

SCALARS = (bool, int, float, str)
SEQUENCES = (list, tuple, deque, set)
"""Types that can be rebuilt from their items, as dicts can."""


@dataclass(frozen=True, slots=True)
class Carried:
    """Stands in for a value that comes as the output at `index`."""

    index: int


class Absent(Tensor):
    """Stands in for a value that is not there."""

    text: str

    @classmethod
    def at(cls, text: str) -> Absent:
        absent = torch.empty(0).as_subclass(cls)
        absent.__dict__["text"] = text
        return absent

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise _refusal(self.__dict__["text"])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"<{self.__dict__['text']}, which is not here>"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        text = next((t.__dict__["text"] for t in tensors_in((args, kwargs)) if isinstance(t, Absent)), "")
        raise _refusal(text)


def _refusal(text: str) -> PartitionError:
    return PartitionError(
        f"the loss reads {text}, which the forward leaves there on another stage, or in the model's own forward; "
        "return it from the model's forward, so that it is part of the output that the loss gets"
    )


@dataclass(frozen=True, slots=True, eq=False)
class Left:
    """An entry of a place that the forward has changed.

    Attributes:
        value: what it was changed to, with `Carried` and `Absent` instead of tensors.
        units: the modules that made it, if all of its tensors are from modules that run as a whole.
        is_carried: whether it contains outputs.
    """

    place: Holder
    key: Any
    value: Any
    units: frozenset[str] = frozenset()
    is_carried: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Behind:
    """An entry of a place that the forward has changed, with its own tensors; `small` are those to carry."""

    place: Holder
    key: Any
    value: Any
    units: frozenset[str]
    small: tuple[Tensor, ...] = ()

    @property
    def text(self) -> str:
        return self.place.name(self.key)

    def to_carry(self, index_of: Callable[[Tensor], int]) -> Left:
        """The same with its tensors replaced. `index_of` returns the index of the output that carries a tensor."""
        wanted = {id(t) for t in self.small}

        def carried(tensor: Tensor) -> Carried | None:
            return Carried(index_of(tensor)) if id(tensor) in wanted else None

        template = template_of(self.value, self.text, carried)
        return Left(self.place, self.key, template, self.units, bool(self.small))


def gather(
    reach: Reach,
    has_node: Callable[[Tensor], bool],
    held: Mapping[int, str],
    provenance: Provenance,
    grain: Grain,
    units: Iterable[Unit],
    real: Collection[str],
) -> list[Behind]:
    """What the forward left, while it is still there.

    Args:
        has_node: whether a tensor is recorded.
        held: `id` of each of the model's own parameters and buffers.
        provenance, grain, units: the recording's.
        real: the units that ran on made-up inputs: a number that one leaves in an attribute is meaningless.

    Raises Learned if units must be opened to carry what they left.
    """
    names = {unit.name for unit in units}
    found, to_open = [], set()
    for place in reach.changed():
        for key, value in place.changes():
            made = {id(t): m for t in tensors_in(value) if id(t) not in held and (m := provenance.maker(t)) is not None}
            plain = type(value) in SCALARS
            text = place.name(key)
            if not (made or plain):
                continue
            inside = place.module and not place.outside
            owner = {name for name in names if inside and is_below(place.text, name)}
            if plain and not owner.isdisjoint(real):
                value = Absent.at(text)
            makers = {m.unit for m in made.values()} if made else owner
            wanted = [t for t in tensors_in(value) if id(t) in made and t.numel() <= SMALL and _nested(value, t)]
            if EVERY in grain.shut or (text not in grain.carried and not any(t.requires_grad for t in wanted)):
                wanted = []
            small = [t for t in wanted if has_node(t)]
            to_open |= {u for t in wanted if not has_node(t) and (u := made[id(t)].unit) in names - grain.shut}
            whole = makers and all(makers)
            found.append(Behind(place, key, value, frozenset(makers if whole else ()), tuple(small)))
    if to_open:
        texts = ", ".join(sorted(to_open)[:4])
        raise Learned(f"{texts} leave values that take a gradient for the loss", opened=to_open, needed=False)
    return found


def _nested(value: Any, tensor: Tensor) -> bool:
    """Whether a tensor is only inside containers that can be rebuilt."""
    if type(value) in SEQUENCES:
        return any(_nested(item, tensor) for item in value)
    if type(value) is dict:
        return any(_nested(item, tensor) for item in value.values())
    return value is tensor


@contextmanager
def in_place(left: Sequence[Left], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Puts what the forward left into its places, built from a microbatch's outputs; restores everything afterwards."""
    before = [(entry.place, entry.place.copied()) for entry in left]
    try:
        for entry in left:
            entry.place.replace(entry.key, filled(entry.value, outputs))
        yield
    finally:
        for place, entries in reversed(before):
            place.put(entries)


def filled(template: Any, outputs: Sequence[Tensor]) -> Any:
    """Fills a template with outputs."""
    if isinstance(template, Carried):
        return outputs[template.index]
    if type(template) in SEQUENCES:
        return type(template)(filled(item, outputs) for item in template)
    if type(template) is dict:
        return {key: filled(item, outputs) for key, item in template.items()}
    return template


def template_of(value: Any, text: str, replace: Callable[[Tensor], Carried | None]) -> Any:
    """A value with its tensors replaced: by what `replace` returns, otherwise by `Absent`."""
    if isinstance(value, Tensor):
        return replace(value) or Absent.at(text)
    if type(value) in SEQUENCES:
        return type(value)(template_of(v, f"{text}[{i}]", replace) for i, v in enumerate(value))
    if type(value) is dict:
        return {k: template_of(v, f"{text}[{k!r}]", replace) for k, v in value.items()}
    if value is None or isinstance(value, nn.Module) or type(value) in CONSTANTS:
        return value
    return Absent.at(text) if any(True for _ in tensors_in(value)) else value
