"""Reads files: costs of stages and links, and the links of a measured network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT, quoted, read_json, validate
from penstock.costs.costs import Costs
from penstock.costs.links import ANY_PAIR, MeasuredLinks
from penstock.simulate.costs import LinkCost, StageCost, StageCosts, check_bandwidth, check_cost

_MEMORY = ("activation", "parameters", "gradients", "optimizer", "unsharded")


@dataclass(frozen=True, slots=True)
class _CostsFile:
    __pydantic_config__ = STRICT
    stages: tuple[Mapping[str, Any], ...]
    links: Any = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _LinksFile:
    __pydantic_config__ = STRICT
    links: tuple[Mapping[str, Any], ...] = ()
    all: Mapping[str, Any] | None = None
    units: Any = None


@dataclass(frozen=True, slots=True)
class _Stage:
    """In the order of `StageCost`."""

    __pydantic_config__ = STRICT
    forward: float
    backward_input: float
    backward_weight: float
    output_bytes: float = 0
    activation: float = 0
    weight_grad: float = 0
    parameters: float = 0
    gradients: float = 0
    optimizer: float = 0
    overlapped: float | None = None
    unsharded: float = 0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if (value := getattr(self, name)) is not None:
                check_cost(name, value)


@dataclass(frozen=True, slots=True)
class _Link:
    __pydantic_config__ = STRICT
    latency: float = 0.0
    bandwidth: float = math.inf

    def __post_init__(self) -> None:
        check_cost("latency", self.latency)
        check_bandwidth("bandwidth", self.bandwidth)


def read_costs(path: Path) -> Costs:
    """Read the file given to --costs. Raise ArgumentError if it is not valid."""
    where = f"--costs {path}"
    data = read_json(path, where)
    given = validate(_CostsFile, data if isinstance(data, dict) else {"stages": data}, where)
    if not given.stages:
        raise ArgumentError(f"{where}: expected a list with an object for each stage; see --help")
    made = tuple(_stage(entry, f"{where}, stage {index}") for index, entry in enumerate(given.stages))
    has_memory = any(key in entry for entry in given.stages for key in _MEMORY)
    are_each = isinstance(given.links, list)
    links = _links(given.links, where) if are_each else _link(given.links, f"{where}, links")
    costs = Costs(made, links, has_memory, source=where)
    costs.check_sizes(costs.source)
    return costs


def read_links(path: Path) -> MeasuredLinks:
    """Read the file given to --links. Raise ArgumentError if it is not valid."""
    where = f"--links {path}"
    given = validate(_LinksFile, read_json(path, where), where)
    every = None if given.all is None else _link(given.all, f"{where}, all")
    if not given.links and every is None:
        raise ArgumentError(f"{where} has no links: add some, or {ANY_PAIR}")
    return MeasuredLinks(_links(given.links, where), every, where)


def _stage(entry: Mapping[str, Any], where: str) -> StageCosts:
    """Parse a stage's cost, or one for each microbatch if some of its numbers are lists."""
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    if not lists:
        return _cost(entry, where)
    lengths = sorted({len(value) for value in lists.values()})
    if len(lengths) > 1 or not lengths[0]:
        raise ArgumentError(
            f"{where}: lists of {' and '.join(map(str, lengths))} numbers: a list has one number for each microbatch, "
            "so give all of a stage's lists the same length"
        )
    return tuple(
        _cost({**entry, **{key: value[k] for key, value in lists.items()}}, f"{where}, microbatch {k}")
        for k in range(lengths[0])
    )


def _cost(entry: Mapping[str, Any], where: str) -> StageCost:
    given = validate(_Stage, {"weight_grad": entry.get("activation", 0), **entry}, where)
    return StageCost(*(getattr(given, name) for name in given.__slots__))


def _links(entries: Sequence[Any], where: str) -> dict[tuple[int, int], LinkCost]:
    links: dict[tuple[int, int], LinkCost] = {}
    for index, entry in enumerate(entries):
        ends, cost = _link_between(entry, f"{where}, link {index}")
        if ends in links:
            first = list(links).index(ends)
            raise ArgumentError(
                f"{where}, link {index}: link {first} is also from rank {quoted(ends[0])} to rank {quoted(ends[1])}; "
                "keep one of them"
            )
        links[ends] = cost
    return links


def _link_between(entry: Any, where: str) -> tuple[tuple[int, int], LinkCost]:
    if not isinstance(entry, dict) or "from" not in entry or "to" not in entry:
        raise ArgumentError(f'{where}: expected ranks, as in {{"from": 0, "to": 1, "latency": 2}}')
    for key in ("from", "to"):
        if type(entry[key]) is not int or entry[key] < 0:
            raise ArgumentError(f"{where}: {key}={quoted(entry[key])}: expected a rank, an integer >= 0")
    start, end = entry["from"], entry["to"]
    if start == end:
        raise ArgumentError(f"{where}: from and to are both rank {quoted(start)}; name two ranks, or leave it out")
    return (start, end), _link({key: value for key, value in entry.items() if key not in ("from", "to")}, where)


def _link(entry: Any, where: str) -> LinkCost:
    given = validate(_Link, entry, where)
    return LinkCost(given.latency, given.bandwidth)
