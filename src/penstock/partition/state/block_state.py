"""What units remember from one call to the next, besides their parameters and buffers.

In a counter, a tensor in an attribute, or a generator, a unit finds what it left there in the previous microbatch. That
works if every call runs once, in order, and on one stage. It fails if two copies of a stage each see part of the batch,
or if a forward is rerun.

Not followed, as no published model needs it: tensors that are no buffers, and are updated in place.

Code outside of units has such state, too: a counter for warm-up or annealing (`self.it += 1; if self.it > 10`), or the
state of a recurrent layer that is kept in the model (`if self.state is not None`). A recording would for ever see what
was there when it was made. It is found in the code of the modules' classes.
"""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import CodeType

from torch import nn

from penstock._base.errors import PartitionError
from penstock.partition.user_code import iter_functions, package_name


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


def find_read_before_set(kinds: Collection[type[nn.Module]]) -> Mapping[str, tuple[bool, str]]:
    """Return the attributes that a function of these classes reads before it sets them, by name: whether the new value
    is made from the old one, and a line that only reads it. One that is only counted, and never read, is none."""
    return _find_read_before_set(
        frozenset(base for kind in kinds for base in kind.__mro__ if package_name(base.__module__) != "torch")
    )


@cache
def _find_read_before_set(classes: frozenset[type]) -> Mapping[str, tuple[bool, str]]:
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
        name: (any(flag for (attr, _), flag in counts.items() if attr == name), reads[name])
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
