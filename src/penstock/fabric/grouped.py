"""Transfers that differ in nothing but their microbatch or replica are one group: a row of a table, a curve of a plot.

A pipeline's messages are so grouped by cut and direction. Each transfer keeps its own samples and results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.fabric.workload import Workload

_ONE_OF_MANY = re.compile(r"^[FB]\d+ | of replica \d+| of microbatch \d+")
"""What tells the names of a group's transfers apart."""
_NUMBERED = re.compile(r"(?<=\.)\d+(?![^.,;])|^\d+(?=\.)")
"""A module that has a number for its name, as those of a list have, with others above or below it."""


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
    return _by_name(workload, _own_name)


def of_like_layers(workload: Workload) -> list[Group]:
    """The same, with layers that differ in a module's number alone in one: h.*.attn."""
    found = _by_name(workload, lambda name: like(_own_name(name)))
    names = [{_own_name(workload.transfers[place].name) for place in group.places} for group in found]
    return [
        Group(next(iter(some)) if len(some) == 1 else group.name, group.places)
        for group, some in zip(found, names, strict=True)
    ]


def like(name: str) -> str:
    """What the names of like layers have in common: of each, all but the outermost module's number."""
    return re.sub(r"\S+", lambda word: _NUMBERED.sub("*", word[0], count=1), name)


def like_as_one(texts: Iterable[str]) -> list[str]:
    """Texts, in which several that differ in numbers of modules alone are one."""
    found: dict[str, list[str]] = {}
    for text in texts:
        found.setdefault(like(text), []).append(text)
    return [some[0] if len(some) == 1 else common for common, some in found.items()]


def _own_name(name: str) -> str:
    return _ONE_OF_MANY.sub("", name)


def _by_name(workload: Workload, common: Callable[[str], str]) -> list[Group]:
    found: dict[tuple[object, ...], list[int]] = {}
    for place, one in enumerate(workload.transfers):
        key = (common(one.name), one.kind, one.collective, one.bytes, len(one.ranks), one.shares)
        found.setdefault(key, []).append(place)
    return [Group(str(key[0]), tuple(places)) for key, places in found.items()]
