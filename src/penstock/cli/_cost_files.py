"""Reads cost files: costs of stages and links (--costs), and the links of a measured network (--links)."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from penstock.cli._costs import ANY_PAIR, Costs, MeasuredLinks
from penstock.errors import ArgumentError
from penstock.files import check_number_of_values, read_text
from penstock.simulate import Links
from penstock.simulate.costs import BOUND, LinkCost, OfStage, StageCost, refuse_extreme

_KEYS = {
    "forward": "forward_seconds",
    "backward_input": "backward_input_seconds",
    "backward_weight": "backward_weight_seconds",
    "output_bytes": "output_bytes",
    "activation": "activation_bytes",
    "weight_grad": "weight_gradient_bytes",
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
    "unsharded": "unsharded_bytes",
    "overlapped": "overlapped_seconds",
}
_NEEDED = ("forward", "backward_input", "backward_weight")
_MEMORY = ("activation", "parameters", "gradients", "optimizer", "unsharded")


def _json(path: Path, option: str, expected: str) -> Any:
    text = read_text(path, f"{option} {path}", 16 << 20)
    check_number_of_values(text, f"{option} {path}")
    try:
        return json.loads(text, object_pairs_hook=lambda pairs: _object(pairs, f"{option} {path}"))
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ArgumentError(f"{option} {path}: {where} is not JSON: {error.msg}") from None
    except ArgumentError:  # is a ValueError too
        raise
    except RecursionError:
        raise ArgumentError(f"{option} {path}: lists or objects are nested too deeply; give {expected}") from None
    except ValueError:  # Python refuses to parse an int of thousands of digits
        raise ArgumentError(
            f"{option} {path}: a number has too many digits; expected one below {BOUND:g}, so give a larger unit"
        ) from None


def _object(pairs: Sequence[tuple[str, Any]], where: str) -> dict[str, Any]:
    """A JSON object. Refuses duplicate keys, of which json would silently keep the last."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ArgumentError(
                f"{where}: an object has the key {shortened(key)} twice, as {shortened(found[key]):.60} and "
                f"{shortened(value):.60}; keep one of them"
            )
        found[key] = value
    return found


def read_costs(path: Path) -> Costs:
    """Reads the file given to --costs. Raises ArgumentError if it is not valid."""
    data = _json(path, "--costs", "a list with an object for each stage")
    whole = data if isinstance(data, dict) else {"stages": data}
    _refuse_unknown(whole, ("stages", "links"), f"--costs {path}")
    stages = whole.get("stages")
    if not isinstance(stages, list) or not stages:
        raise ArgumentError(f"--costs {path}: expected a list with an object for each stage; see --help")
    made = tuple(_stage(entry, f"--costs {path}, stage {index}") for index, entry in enumerate(stages))
    has_memory = any(key in entry for entry in stages for key in _MEMORY)
    costs = Costs(made, _links(whole.get("links", {}), f"--costs {path}"), has_memory, source=f"--costs {path}")
    costs.check_sizes(costs.source)
    return costs


def read_links(path: Path) -> MeasuredLinks:
    """Reads the file given to --links. Raises ArgumentError if it is not valid."""
    where = f"--links {path}"
    data = _json(path, "--links", "an object with a list of links")
    links = data.get("links", []) if isinstance(data, dict) else None
    if not isinstance(links, list):
        raise ArgumentError(
            f'{where}: expected an object with a list, {{"links": [{{"from": 0, "to": 1, "latency": 1e-4, "bandwidth": '
            "1e8}, ...]}, as links.json in the folder of a run of penstock fabric"
        )
    _refuse_unknown(data, ("links", "all", "units"), where)
    every = _link(data["all"], f"{where}, all") if "all" in data else None
    if not links and every is None:
        raise ArgumentError(f"{where} has no links: give some, or {ANY_PAIR}")
    pairs = _links(links, where)
    return MeasuredLinks({} if isinstance(pairs, LinkCost) else pairs, every, where)


def _stage(entry: Any, where: str) -> OfStage:
    """A stage's cost, or one for each microbatch if some of its numbers are lists."""
    lists = {key: value for key, value in entry.items() if isinstance(value, list)} if isinstance(entry, dict) else {}
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


def _cost(entry: Any, where: str) -> StageCost:
    numbers = _numbers(entry, _KEYS, _NEEDED, where)
    numbers.setdefault("weight_grad", numbers.get("activation", 0.0))
    return StageCost(**{_KEYS[key]: value for key, value in numbers.items()})


def _links(entry: Any, where: str) -> Links:
    if not isinstance(entry, list):
        return _link(entry, f"{where}, links")
    links: dict[tuple[int, int], LinkCost] = {}
    for index, one in enumerate(entry):
        ends, cost = _link_between(one, f"{where}, link {index}")
        if ends in links:
            first = list(links).index(ends)
            raise ArgumentError(
                f"{where}, link {index}: link {first} is also from rank {shortened(ends[0])} to rank "
                f"{shortened(ends[1])}; keep one of them"
            )
        links[ends] = cost
    return links


def _link_between(entry: Any, where: str) -> tuple[tuple[int, int], LinkCost]:
    if not isinstance(entry, dict) or "from" not in entry or "to" not in entry:
        raise ArgumentError(f'{where}: expected ranks, as in {{"from": 0, "to": 1, "latency": 2}}')
    start, end = (_rank(entry, key, where) for key in ("from", "to"))
    if start == end:
        raise ArgumentError(f"{where}: from and to are both rank {shortened(start)}; give two ranks or leave it out")
    costs = {key: value for key, value in entry.items() if key not in ("from", "to")}
    return (start, end), _link(costs, where)


def _rank(entry: Mapping[str, Any], key: str, where: str) -> int:
    value = entry[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ArgumentError(f"{where}: {key}={shortened(value):.60}: expected a rank, a whole number of 0 or more")
    return value


def _link(entry: Any, where: str) -> LinkCost:
    numbers = _numbers(entry, ("latency", "bandwidth"), (), where)
    return LinkCost(numbers.get("latency", 0.0), numbers.get("bandwidth", math.inf))


def _numbers(
    entry: Any, known: Sequence[str] | Mapping[str, str], needed: Sequence[str], where: str
) -> dict[str, float]:
    """The entry's numbers by key. Raises ArgumentError if a key is unknown or missing, or a value is not a number."""
    if not isinstance(entry, dict):
        raise ArgumentError(
            f"{where}: expected an object of numbers by name ({', '.join(known)}), not {shortened(entry):.60}"
        )
    _refuse_unknown(entry, known, where)
    for key in needed:
        if key not in entry:
            raise ArgumentError(f"{where}: {key!r} is missing; each stage has {', '.join(needed)}")
    return {key: _number(key, value, where) for key, value in entry.items()}


def _number(key: str, value: Any, where: str) -> float:
    # Deeply nested values have no repr, and an int's may be very long.
    given = f"{where}: {key}={shortened(value):.60}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{given}: expected a number")
    if not value >= 0 or (key == "bandwidth" and not value):
        raise ArgumentError(f"{given}: expected {'above 0' if key == 'bandwidth' else '0 or more'}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    refuse_extreme(key, number, given)
    return number


def _refuse_unknown(entry: Mapping[str, Any], known: Sequence[str] | Mapping[str, str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise ArgumentError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")
