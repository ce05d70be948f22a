"""What units remember from one call to the next, besides their parameters and buffers.

In a counter, a tensor in an attribute, or a generator, a unit finds what it left there in the previous microbatch. That
works if every call runs once, in order, and on one stage. It fails if two copies of a stage each see part of the batch,
or if a forward is rerun.

Not followed, as no published model needs it: tensors that are no buffers, and are updated in place.

Code outside of units has such state, too: a counter for warm-up or annealing (`self.it += 1; if self.it > 10`), or the
state of a recurrent layer that is kept in the model (`if self.state is not None`). A recording would for ever see what
was there when it was made. It is found in the code of the modules' classes.

The second part (`Left`) is what a forward leaves behind besides its result, for the loss function to read:
`layer.l_aux`, a list of losses. Stages do not leave it: a value that was recorded call by call is not stored in any
attribute, and another stage's modules are in another process. So small values that require a gradient travel to the
last stage as extra outputs, and are put in their places while the loss function runs. All other values are replaced by
something that raises when used.

Most blocks that leave something for others (`self.l_aux = ...`) are opened, so that nothing is left anywhere
(`run/side_channels.py`). One that depends on values must run as a whole: right after the call, its value is taken out
of the attribute, and is then a value like any other.
"""

from __future__ import annotations

import dis
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.errors import PartitionError
from penstock._base.pytree import flatten, unflatten
from penstock.partition.source import iter_functions, package_name
from penstock.partition.state.reach import Holder
from penstock.partition.values.objects import tensors_in


@dataclass(frozen=True, slots=True)
class Remembered:
    """Something that a unit leaves for its own next call.

    Attributes:
        text: where a user finds it.
        unit: the unit's name.
        follows: sizes of kept tensors that follow the number of samples, or of steps, that the unit is given.
    """

    text: str
    unit: str
    follows: frozenset[int] = frozenset()


def refuse_apart(remembered: Remembered, stages: Collection[int]) -> None:
    """Raise PartitionError if a unit that remembers something is called on several stages."""
    if len(stages) > 1:
        raise PartitionError(
            f"{remembered.text} carries something over from one call of {remembered.unit!r} to the next, but these are "
            f"on stages {sorted(stages)}: none would see what the others leave there. Move the cut so that all are on "
            "one stage, or pass it as an argument and return it"
        )


def refuse_copies(index: int, remembered: Sequence[Remembered], pipelines: int) -> None:
    """Raise PartitionError if a stage with several copies remembers something."""
    for entry in remembered:
        raise PartitionError(
            f"{entry.text} of stage {index} carries something over from one microbatch to the next, but this schedule "
            f"runs {pipelines} copies of the stage, each of which would see only part of the batch; use a schedule "
            "with one copy (dualpipe-v for dualpipe)"
        )


def refuse_again(index: int, remembered: Sequence[Remembered], units: Collection[str] | None = None) -> None:
    """Raise PartitionError if a forward that is rerun remembers something.

    Args:
        units: the units that are rerun; None: the whole stage.
    """
    for entry in remembered:
        if units is None or entry.unit in units:
            raise PartitionError(
                f"recompute: {entry.text} of stage {index} carries something over from one microbatch to the next, so "
                f"that running a forward again would give something else; choose recompute={{{index}: 'never'}}"
            )


def refuse_samples(remembered: Iterable[Remembered], sizes: Sequence[int]) -> None:
    """Raise PartitionError if a block keeps tensors with a row for each sample (the state of a recurrent layer that is
    trained over steps): the next microbatch, whose samples are others, would begin with them.

    Args:
        sizes: how many samples each microbatch has.
    """
    for entry in remembered if len(sizes) > 1 else ():
        if not entry.follows.isdisjoint(sizes):
            raise PartitionError(
                f"{entry.text} holds tensors with a row for each of a microbatch's samples, with which the next "
                "microbatch, of other samples, would begin. Pass such state in and out: take it as an input, which is "
                "cut like the batch, and return it with the result; or set microbatches=1"
            )


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """An attribute that a function reads before it sets it.

    Attributes:
        counts: whether its new value is made from its old one.
        read_at: a line that reads it, besides those that set it.
    """

    counts: bool
    read_at: str


def find_carried(kinds: Collection[type[nn.Module]]) -> Mapping[str, CarriedOver]:
    """Return those in the code of these classes, by name. One that is only counted, and never read, is none."""
    return _find_carried(
        frozenset(base for kind in kinds for base in kind.__mro__ if package_name(base.__module__) != "torch")
    )


@cache
def _find_carried(classes: frozenset[type]) -> Mapping[str, CarriedOver]:
    counts: dict[tuple[str, type], bool] = {}
    reads: dict[str, str] = {}
    first: set[tuple[str, type]] = set()  # what a forward sets before anything reads it, in itself or in any object
    for kind in sorted(classes, key=lambda kind: kind.__qualname__):
        for name, code in ((name, f.__code__) for name, member in vars(kind).items() for f in iter_functions(member)):
            lines: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
            attrs: set[str] = set()
            for attribute, line, sets, of_self in _accesses(code) if name != "__init__" else ():
                attrs |= {attribute} if of_self and attribute not in lines else set()
                lines[attribute].append((line, sets))
            for attribute, accesses in lines.items():
                loads, stores = ({line for line, is_store in accesses if is_store is s} for s in (False, True))
                if accesses[0][1]:
                    first |= {(attribute, kind if attribute in attrs else object)} if name == "forward" else set()
                elif stores:
                    counts[attribute, kind] = counts.get((attribute, kind), False) or bool(loads & stores)
                for line in sorted(loads - stores):
                    reads.setdefault(attribute, f"{code.co_filename}:{line}")
    for key in first:
        for attr in [attr for attr in counts if attr[0] == key[0]]:
            if issubclass(key[1], attr[1]) or issubclass(attr[1], key[1]):
                del counts[attr]
    return {
        name: CarriedOver(any(flag for (attr, _), flag in counts.items() if attr == name), reads[name])
        for name in {name for name, _ in counts} & reads.keys()
    }


def _accesses(code: CodeType) -> Iterator[tuple[str, int, bool, bool]]:
    """Yield each attribute that code reads or sets, in order: its name, the line, whether it is set, and whether it is
    one of `self`."""
    line, before = code.co_firstlineno, None
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions and instruction.positions.lineno else line
        if instruction.opname in ("LOAD_ATTR", "STORE_ATTR"):
            yield instruction.argval, line, instruction.opname == "STORE_ATTR", before in ("self", ("self",))
        before = instruction.argval[1:] if isinstance(instruction.argval, tuple) else instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _accesses(constant)


MAX_CARRIED = 1024
"""The most elements that a value may have to be carried to the last stage in case the loss function reads it."""


ALL_UNITS = "*"
"""If this is among the names of shut units, nothing is carried at all."""

SCALARS = (bool, int, float, str)


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
        value: what it was changed to; once recorded, flattened, with `Carried` and `Absent` instead of tensors.
        units: the modules that made it, if all of its tensors are from modules that run as a whole.
        small: its tensors to carry.
        is_carried: whether there are any.
    """

    place: Holder
    key: Any
    value: Any
    units: frozenset[str] = frozenset()
    small: tuple[Tensor, ...] = ()
    is_carried: bool = False

    @property
    def text(self) -> str:
        return self.place.name(self.key)

    def recorded(self, find_output: Callable[[Tensor], int]) -> Left:
        """Return the same with its tensors replaced. `find_output` returns the index of the output that carries a
        tensor."""
        carried_ids, flat = {id(t) for t in self.small}, flatten(self.value)
        leaves: list[Any] = []
        for leaf, path in zip(flat.leaves, flat.paths, strict=True):
            if id(leaf) in carried_ids:
                leaves.append(Carried(find_output(leaf)))
            else:
                leaves.append(Absent.at(self.text + path) if any(True for _ in tensors_in(leaf)) else leaf)
        return replace(self, value=flat._replace(leaves=leaves), small=(), is_carried=bool(self.small))


@contextmanager
def in_place(left: Sequence[Left], outputs: Sequence[Tensor]) -> Iterator[None]:
    """Put what the forward left into its places, built from a microbatch's outputs; restore everything afterwards."""
    snapshots = [(entry.place, entry.place.copied()) for entry in left]
    try:
        for entry in left:
            leaves = [outputs[leaf.index] if isinstance(leaf, Carried) else leaf for leaf in entry.value.leaves]
            value = unflatten(leaves, entry.value.structure)
            entry.place.put(value if entry.key is None else {**entry.place.entries, entry.key: value})
        yield
    finally:
        for holder, entries in reversed(snapshots):
            holder.put(entries)


class Attribute:
    """An attribute of a module that each call of a block sets anew.

    Args:
        name: where a user finds it.
        module, key: the module and the attribute's name.
    """

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self.key = name, key
        self._entries = vars(module)  # not the module: a stage would then hold its parameters twice
        self._last: Callable[[], Tensor | None] = lambda: None

    def take(self) -> Tensor:
        """Return the value that the latest call left. Raise PartitionError if it left none."""
        value = self._entries.get(self.key)
        if not isinstance(value, Tensor) or value is self._last():
            raise PartitionError(
                f"{self.name!r} was set by the call in which the model was recorded, but not by this one: set it to a "
                "tensor in every forward"
            )
        self._last = weakref.ref(value)
        return value


def taken(result: Any, attribute: Attribute) -> Tensor:
    """Return what the call that returned `result` left in an attribute."""
    return attribute.take()


def find_attributes(block: nn.Module, name: str, taken_names: Collection[str]) -> Iterator[tuple[Attribute, Tensor]]:
    """Yield the attributes of a block's modules that hold tensors to take, apart from parameters and buffers.

    These are tensors that require a gradient, and the attributes in `taken_names`, which did so in another recording:
    the loss of an evaluation reads them too.
    """
    for inner, module in block.named_modules(prefix=name):
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and (value.requires_grad or f"{inner}.{key}" in taken_names):
                yield Attribute(f"{inner}.{key}", module, key), value
