"""Group transfers that differ only in microbatch or replica: one group is one row of a table, or one curve of a plot.

This groups a pipeline's messages by cut and direction. Each transfer keeps its own samples and results.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.network.fabric.workload import Workload

_ONE_OF_MANY = re.compile(r"^[FB]\d+ | of replica \d+| of microbatch \d+")
"""The part of a name that distinguishes the members of a group."""
_NUMBERED = re.compile(r"(?<=\.)\d+(?![^.,;])|^\d+(?=\.)")
"""A module whose name is a number, like an item of a list, with other modules above or below it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Similar transfers of a workload.

    Attributes:
        name: the common part of their names.
        places: their indices in the workload, in order of execution.
    """

    name: str
    places: tuple[int, ...]


def groups(workload: Workload) -> list[Group]:
    """Groups all transfers of a workload, ordered by each group's first transfer."""
    return _by_name(workload, _own_name)


def group_similar_layers(workload: Workload) -> list[Group]:
    """Groups transfers as `groups` does, and merges layers that differ only in one module number: h.*.attn."""
    found = _by_name(workload, lambda name: like(_own_name(name)))
    names = [{_own_name(workload.transfers[place].name) for place in group.places} for group in found]
    return [
        Group(next(iter(some)) if len(some) == 1 else group.name, group.places)
        for group, some in zip(found, names, strict=True)
    ]


def like(name: str) -> str:
    """Replaces the outermost module number of each word by `*`, so that similar layers get the same name."""
    return re.sub(r"\S+", lambda word: _NUMBERED.sub("*", word[0], count=1), name)


def like_as_one(texts: Iterable[str]) -> list[str]:
    """Merges texts that differ only in their modules' numbers."""
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
