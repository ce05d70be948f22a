"""Finds attributes by which a forward carries something over to its next call, in the code of its modules' classes.

A counter for warm-up or annealing (`self.it += 1; if self.it > 10`), or the state of a recurrent layer that is kept in
the model (`if self.state is not None`). A recording would for ever see what was there when it was made.
"""

from __future__ import annotations

import dis
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from types import CodeType

from torch import nn

from penstock.partition.state.library import functions_of, package_of


@dataclass(frozen=True, slots=True)
class CarriedOver:
    """An attribute that a function reads before it sets it.

    Attributes:
        counts: whether its new value is made from its old one.
        read_at: a line that reads it, besides those that set it.
    """

    counts: bool
    read_at: str


def carried(kinds: Collection[type[nn.Module]]) -> Mapping[str, CarriedOver]:
    """Those in the code of these classes, by name. One that is only counted, and never read, is none."""
    return _carried(
        frozenset(base for kind in kinds for base in kind.__mro__ if package_of(base.__module__) != "torch")
    )


@cache
def _carried(classes: frozenset[type]) -> Mapping[str, CarriedOver]:
    counts: dict[tuple[str, type], bool] = {}
    reads: dict[str, str] = {}
    begun: set[tuple[str, type]] = set()  # what a forward sets before anything reads it, in itself or in any object
    for kind in sorted(classes, key=lambda kind: kind.__qualname__):
        for name, code in ((name, f.__code__) for name, member in vars(kind).items() for f in functions_of(member)):
            lines: defaultdict[str, list[tuple[int, bool]]] = defaultdict(list)
            own: set[str] = set()
            for attribute, line, sets, of_self in _accesses(code) if name != "__init__" else ():
                own |= {attribute} if of_self and attribute not in lines else set()
                lines[attribute].append((line, sets))
            for attribute, accesses in lines.items():
                loads, stores = ({line for line, is_store in accesses if is_store is kind} for kind in (False, True))
                if accesses[0][1]:
                    begun |= {(attribute, kind if attribute in own else object)} if name == "forward" else set()
                elif stores:
                    counts[attribute, kind] = counts.get((attribute, kind), False) or bool(loads & stores)
                for line in sorted(loads - stores):
                    reads.setdefault(attribute, f"{code.co_filename}:{line}")
    for each in begun:
        for other in [other for other in counts if other[0] == each[0]]:
            if issubclass(each[1], other[1]) or issubclass(other[1], each[1]):
                del counts[other]
    return {
        name: CarriedOver(any(made for (other, _), made in counts.items() if other == name), reads[name])
        for name in {name for name, _ in counts} & reads.keys()
    }


def _accesses(code: CodeType) -> Iterator[tuple[str, int, bool, bool]]:
    """Each attribute that code reads or sets, in order: its name, the line, whether it is set, and whether it is one of
    `self`."""
    line, before = code.co_firstlineno, None
    for instruction in dis.get_instructions(code):
        line = instruction.positions.lineno if instruction.positions and instruction.positions.lineno else line
        if instruction.opname in ("LOAD_ATTR", "STORE_ATTR"):
            yield instruction.argval, line, instruction.opname == "STORE_ATTR", before in ("self", ("self",))
        before = instruction.argval[1:] if isinstance(instruction.argval, tuple) else instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _accesses(constant)
