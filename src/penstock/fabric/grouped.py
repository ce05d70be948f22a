"""Transfers that differ in nothing but their microbatch or replica are one group: a row of a table, a curve of a plot.

A pipeline's messages are so grouped by cut and direction. Each transfer keeps its own samples and results.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.fabric.workload import Workload

_ONE_OF_MANY = re.compile(r"^[FB]\d+ | of replica \d+| of microbatch \d+")
"""What tells the names of a group's transfers apart."""


@dataclass(frozen=True, slots=True)
class Group:
    """Alike transfers of a workload.

    Attributes:
        name: what is common to their names.
        places: theirs in the workload, in order of execution.
    """

    name: str
    places: tuple[int, ...]


def groups(workload: Workload) -> list[Group]:
    """All transfers, in order of each group's first."""
    found: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(workload.transfers):
        name = _ONE_OF_MANY.sub("", one.name)
        key = (name, one.kind, one.collective, one.bytes, len(one.ranks), one.shares)
        found.setdefault(key, []).append(place)
    return [Group(str(key[0]), tuple(places)) for key, places in found.items()]
