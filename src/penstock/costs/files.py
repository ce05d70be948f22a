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

_MEMORY_KEYS = ("activation", "parameters", "gradients", "optimizer", "unsharded")


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
    source = f"--costs {path}"
    data = read_json(path, source)
    parsed = validate(_CostsFile, data if isinstance(data, dict) else {"stages": data}, source)
    if not parsed.stages:
        raise ArgumentError(f"{source}: expected a list with an object for each stage; see --help")
    stages = tuple(_parse_stage(entry, f"{source}, stage {index}") for index, entry in enumerate(parsed.stages))
    has_memory = any(key in entry for entry in parsed.stages for key in _MEMORY_KEYS)
    has_pairs = isinstance(parsed.links, list)
    links = _parse_links(parsed.links, source) if has_pairs else _parse_link(parsed.links, f"{source}, links")
    costs = Costs(stages, links, has_memory, source=source)
    costs.check_sizes(costs.source)
    return costs


def read_links(path: Path) -> MeasuredLinks:
    """Read the file given to --links. Raise ArgumentError if it is not valid."""
    source = f"--links {path}"
    parsed = validate(_LinksFile, read_json(path, source), source)
    default = None if parsed.all is None else _parse_link(parsed.all, f"{source}, all")
    if not parsed.links and default is None:
        raise ArgumentError(f"{source} has no links: add some, or {ANY_PAIR}")
    return MeasuredLinks(_parse_links(parsed.links, source), default, source)


def _parse_stage(entry: Mapping[str, Any], location: str) -> StageCosts:
    """Parse a stage's cost, or one for each microbatch if some of its numbers are lists."""
    lists = {key: value for key, value in entry.items() if isinstance(value, list)}
    if not lists:
        return _parse_cost(entry, location)
    lengths = sorted({len(value) for value in lists.values()})
    if len(lengths) > 1 or not lengths[0]:
        raise ArgumentError(
            f"{location}: lists of {' and '.join(map(str, lengths))} numbers: a list has one number per microbatch, so "
            "all lists of a stage need the same length"
        )
    return tuple(
        _parse_cost({**entry, **{key: value[k] for key, value in lists.items()}}, f"{location}, microbatch {k}")
        for k in range(lengths[0])
    )


def _parse_cost(entry: Mapping[str, Any], location: str) -> StageCost:
    parsed = validate(_Stage, {"weight_grad": entry.get("activation", 0), **entry}, location)
    return StageCost(*(getattr(parsed, name) for name in parsed.__slots__))


def _parse_links(entries: Sequence[Any], location: str) -> dict[tuple[int, int], LinkCost]:
    links: dict[tuple[int, int], LinkCost] = {}
    for index, entry in enumerate(entries):
        ends, cost = _parse_pair(entry, f"{location}, link {index}")
        if ends in links:
            first = list(links).index(ends)
            raise ArgumentError(
                f"{location}, link {index}: link {first} is also from rank {quoted(ends[0])} to rank "
                f"{quoted(ends[1])}; keep one of them"
            )
        links[ends] = cost
    return links


def _parse_pair(entry: Any, location: str) -> tuple[tuple[int, int], LinkCost]:
    if not isinstance(entry, dict) or "from" not in entry or "to" not in entry:
        raise ArgumentError(f'{location}: expected ranks, as in {{"from": 0, "to": 1, "latency": 2}}')
    for key in ("from", "to"):
        if type(entry[key]) is not int or entry[key] < 0:
            raise ArgumentError(f"{location}: {key}={quoted(entry[key])}: expected a rank, an integer >= 0")
    start, end = entry["from"], entry["to"]
    if start == end:
        raise ArgumentError(f"{location}: from and to are both rank {quoted(start)}; name two ranks, or remove it")
    return (start, end), _parse_link({k: v for k, v in entry.items() if k not in ("from", "to")}, location)


def _parse_link(entry: Any, location: str) -> LinkCost:
    parsed = validate(_Link, entry, location)
    return LinkCost(parsed.latency, parsed.bandwidth)
