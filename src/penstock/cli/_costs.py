"""The options that say what stages and links cost, as numbers for all stages or as a file with each stage's own."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from reprlib import repr as shortened
from typing import Annotated, Any

import typer

from penstock.cli._order import read_text
from penstock.costs import LinkCost, StageCost
from penstock.errors import ArgumentError
from penstock.schedule import Placement, Schedule
from penstock.simulate import NO_COST, Links

_PANEL = "Costs: of one microbatch on one stage, in any one unit"

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
    "overlapped": "overlapped_seconds",
}
_BOUND = 1e100
"""Costs are below it, and bandwidths above its inverse: sums, and sizes divided by bandwidths, stay finite."""
_NEEDED = ("forward", "backward_input", "backward_weight")
_MEMORY = ("activation", "parameters", "gradients", "optimizer")

EPILOG = "\n\n".join(
    (
        "--costs FILE gives each stage costs of its own, as a JSON list with an object a stage:",
        '[{"forward": 10, "backward_input": 11, "backward_weight": 9}, ...]',
        "and in it output_bytes, activation, weight_grad, parameters, gradients, optimizer and overlapped (what a "
        "forward and a backward that overlap take together), where they are known. For links as well:",
        '{"stages": [...], "links": {"latency": 1, "bandwidth": 100}}',
        'or, where each pair of ranks has its own, "links": [{"from": 0, "to": 1, "latency": 1}, ...].',
        '--links FILE is what `penstock fabric` writes: the links that it measured, and with "all" one for every other '
        "pair. Give all costs in seconds and bytes then.",
    )
)
"""Below the options of a verb that has costs."""


def _option(text: str, *names: str, **more: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel=_PANEL, **more)


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What stages and links cost. None: not given."""

    forward: Annotated[float | None, _option("F, the forward; 1 if nothing is said.")] = None
    backward_input: Annotated[
        float | None, _option("I, the backward that gives the input's gradient; 1 if nothing is said.")
    ] = None
    backward_weight: Annotated[
        float | None, _option("W, the backward that gives the weights' gradient; 1 if nothing is said. B is I + W.")
    ] = None
    comm: Annotated[float | None, _option("What a message between two ranks takes; 0 if nothing is said.")] = None
    output_bytes: Annotated[
        float | None, _option("The size of such a message; with --bandwidth it takes size / bandwidth longer.")
    ] = None
    bandwidth: Annotated[float | None, _option("Of each link between two ranks, in sizes a unit of time.")] = None
    contended: Annotated[bool, _option("A link carries one message at a time; needs a bandwidth.", "--contended")] = (
        False
    )
    memory_activation: Annotated[
        float | None, _option("What F keeps for the backward, in any unit; else an activation counts 1.")
    ] = None
    memory_weight_grad: Annotated[
        float | None,
        _option("The part of it that stays from I until W, where the backward is split; all if nothing is said."),
    ] = None
    costs: Annotated[
        Path | None, _option("Each stage's own costs, instead of the above; see below.", metavar="FILE")
    ] = None
    links: Annotated[
        Path | None,
        _option("A measured network's links, instead of --comm and --bandwidth; see below.", metavar="FILE"),
    ] = None

    def read(self) -> Costs:
        """The costs, as the options or the file has them.

        Raises:
            ArgumentError: a cost is negative, an option lacks the one that it belongs to, both options and a file are
                given, or the file cannot be read.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("contended", "costs", "links")}
        given = {name: value for name, value in given.items() if value is not None}
        if self.links is not None and (twice := [name for name in ("comm", "bandwidth") if name in given]):
            raise ArgumentError(
                f"--links {self.links}: the file says what {_name(twice[0])} would; give one of the two"
            )
        if self.costs is not None:
            if given:
                raise ArgumentError(f"--costs {self.costs}: the file says what {_name(next(iter(given)))} would")
            costs = _read_file(self.costs)
        else:
            costs = self._from_numbers(given)
        if self.links is not None:
            costs = costs.with_links(read_links(self.links))
        if self.contended and not costs.has_bandwidth:
            raise ArgumentError("--contended: no message holds up another where no link has a bandwidth; give one")
        return replace(costs, contended=self.contended)

    def _from_numbers(self, given: Mapping[str, float]) -> Costs:
        for name, value in given.items():
            if not value >= 0:
                raise ArgumentError(f"{_name(name)} {value:g}: expected a cost of 0 or more")
            _refuse_extreme(name, value, f"{_name(name)} {value:g}")
        for name, other in (("output_bytes", "bandwidth"), ("bandwidth", "output_bytes")):
            if name in given and other not in given and self.links is None:
                raise ArgumentError(f"{_name(name)} means nothing without {_name(other)}; give both")
        if given.get("bandwidth") == 0:
            raise ArgumentError("--bandwidth 0: expected a bandwidth above 0")
        activation = given.get("memory_activation", 0.0)
        weight_gradient = given.get("memory_weight_grad", activation)
        if weight_gradient > activation:
            raise ArgumentError(
                f"--memory-weight-grad {weight_gradient:g} of --memory-activation {activation:g}: what W needs is a "
                "part of what F keeps; give no more than that"
            )
        forward, backward_input, backward_weight = (given.get(name, 1.0) for name in _NEEDED)
        output = given.get("output_bytes", 0.0)
        stage = StageCost(forward, backward_input, backward_weight, output, activation, weight_gradient)
        link = LinkCost(given.get("comm", 0.0), given.get("bandwidth", math.inf))
        return Costs(stage, link, has_memory="memory_activation" in given)


@dataclass(frozen=True, slots=True)
class MeasuredLinks(Mapping[tuple[int, int], LinkCost]):
    """Links of hosts, which are ranks in the same order.

    Attributes:
        pairs: by (rank that sends, rank that receives).
        every: of all pairs that are not there; None: they have no cost.
        source: the file, for messages.
    """

    pairs: Mapping[tuple[int, int], LinkCost]
    every: LinkCost | None
    source: str

    def __getitem__(self, ends: tuple[int, int]) -> LinkCost:
        found = self.pairs.get(ends, self.every)
        if found is None:
            raise KeyError(ends)
        return found

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(self.pairs)

    def __len__(self) -> int:
        return len(self.pairs)

    @property
    def has_bandwidth(self) -> bool:
        known = [*self.pairs.values(), *([self.every] if self.every else [])]
        return any(link.bytes_per_second < math.inf for link in known)

    def check(self, ranks: int, name: str) -> None:
        """Raises ArgumentError if there are fewer hosts than ranks, and nothing is said of other pairs."""
        hosts = max(map(max, self.pairs), default=-1) + 1
        if self.every is None and hosts < ranks:
            raise ArgumentError(
                f"{self.source} has links of {hosts} hosts, but {name} has {ranks} ranks: measure as many, or give "
                f"{_EVERY} for the pairs that were not measured"
            )


_EVERY = '"all": {"latency": 1e-4, "bandwidth": 1e8}'


@dataclass(frozen=True, slots=True)
class Costs:
    """What stages and links cost, in the units that they were given in.

    Attributes:
        stages: of every stage, or one for each.
        links: as `simulate` takes them.
        has_memory: whether anything was said about memory.
        contended: as `simulate` takes it.
        source: where the costs of each stage come from.
    """

    stages: StageCost | tuple[StageCost, ...]
    links: Links
    has_memory: bool = False
    contended: bool = False
    source: str = ""

    def with_links(self, links: MeasuredLinks) -> Costs:
        """These costs, on a measured network. Raises ArgumentError where they have links, or messages have no size."""
        if self.links != NO_COST:
            raise ArgumentError(f"{self.source} has links, and {links.source} as well: give one of the two")
        stages = [self.stages] if isinstance(self.stages, StageCost) else self.stages
        if links.has_bandwidth and not any(stage.output_bytes for stage in stages):
            raise ArgumentError(
                f"{links.source}: how long a message takes depends on its size; give --output-bytes, or output_bytes "
                "in the file of --costs"
            )
        return replace(self, links=links)

    @property
    def has_bandwidth(self) -> bool:
        if isinstance(self.links, MeasuredLinks):
            return self.links.has_bandwidth
        links = [self.links] if isinstance(self.links, LinkCost) else self.links.values()
        return any(link.bytes_per_second < math.inf for link in links)

    def of(self, schedule: Schedule) -> list[StageCost]:
        """Of each of the schedule's stages; a slice of a microbatch costs its share.

        Raises:
            ArgumentError: there are costs for more or fewer stages, or for a link of a rank that does not exist.
        """
        stages = self.of_stages(schedule.placement, schedule.name)
        if schedule.slices > 1:
            stages = [_divided(cost, schedule.slices, (*_WORK, "output_bytes")) for cost in stages]
        return stages

    def of_stages(self, placement: Placement, name: str) -> list[StageCost]:
        """Of each stage, copies included. Raises as `of`; `name` is that of what has the stages."""
        depth = placement.depth
        stages = [self.stages] * depth if isinstance(self.stages, StageCost) else list(self.stages)
        if len(stages) != depth:
            raise ArgumentError(f"{self.source} has {len(stages)} stages, but {name} needs {depth}: give as many")
        self._check_ranks(placement.ranks, name)
        return stages * placement.pipelines

    def _check_ranks(self, ranks: int, name: str) -> None:
        if isinstance(self.links, MeasuredLinks):
            self.links.check(ranks, name)
            return
        for start, end in () if isinstance(self.links, LinkCost) else self.links:
            if max(start, end) >= ranks:
                raise ArgumentError(
                    f"{self.source} has a link from rank {shortened(start)} to rank {shortened(end)}, but the last "
                    f"rank of {name} is {ranks - 1}: correct the link or leave it out"
                )

    def for_model_of(self, schedule: Schedule) -> Costs:
        """The costs with which a schedule trains the same model as all others do.

        Numbers are then a rank's, and each of its chunks takes its share; the stages of a file are the model's, and
        neighbours are put together where the schedule has fewer.

        Raises:
            ArgumentError: the file's stages cannot be put together to as many as the schedule has.
        """
        depth = schedule.placement.depth
        if isinstance(self.stages, StageCost):
            return replace(self, stages=_divided(self.stages, depth // schedule.ranks, _WORK))
        size, rest = divmod(len(self.stages), depth)
        if rest or not size:
            raise ArgumentError(f"{self.source} has {len(self.stages)} stages, which cannot be put together to {depth}")
        joined = (_joined(self.stages[first : first + size]) for first in range(0, len(self.stages), size))
        return replace(self, stages=tuple(joined))


_WORK = (*(_KEYS[key] for key in _NEEDED), "overlapped_seconds", "activation_bytes", "weight_gradient_bytes")
"""What each of several parts of a stage's work has its share of."""


def _divided(cost: StageCost, by: int, names: Sequence[str]) -> StageCost:
    shares = {name: value / by for name in names if (value := getattr(cost, name)) is not None}
    return replace(cost, **shares)


def _joined(stages: Sequence[StageCost]) -> StageCost:
    """Neighbouring stages as one; only the last one's output leaves it."""
    values = {f.name: [getattr(stage, f.name) for stage in stages] for f in fields(StageCost)}
    sums: dict[str, Any] = {name: None if None in column else sum(column) for name, column in values.items()}
    return StageCost(**{**sums, "output_bytes": stages[-1].output_bytes})


# -- the file ---------------------------------------------------------------------------------------------------------


def _json(path: Path, option: str, expected: str) -> Any:
    text = read_text(path, option)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise ArgumentError(f"{option} {path}: {where} is no JSON: {error.msg}") from None
    except RecursionError:
        raise ArgumentError(f"{option} {path}: too many lists or objects in each other; give {expected}") from None
    except ValueError:  # Python makes no int of thousands of digits
        raise ArgumentError(
            f"{option} {path}: a number has too many digits; expected one below {_BOUND:g}, so give a larger unit"
        ) from None


def _read_file(path: Path) -> Costs:
    data = _json(path, "--costs", "a list with an object for each stage")
    whole = data if isinstance(data, dict) else {"stages": data}
    _refuse_unknown(whole, ("stages", "links"), f"--costs {path}")
    stages = whole.get("stages")
    if not isinstance(stages, list) or not stages:
        raise ArgumentError(f"--costs {path}: expected a list with an object for each stage; see --help")
    made = tuple(_stage(entry, f"--costs {path}, stage {index}") for index, entry in enumerate(stages))
    has_memory = any(key in entry for entry in stages for key in _MEMORY)
    return Costs(made, _links(whole.get("links", {}), f"--costs {path}"), has_memory, source=str(path))


def read_links(path: Path) -> MeasuredLinks:
    """The file of --links. Raises ArgumentError for what is none."""
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
        raise ArgumentError(f"{where} has no links: give some, or {_EVERY}")
    pairs = _links(links, where)
    return MeasuredLinks({} if isinstance(pairs, LinkCost) else pairs, every, where)


def _stage(entry: Any, where: str) -> StageCost:
    numbers = _numbers(entry, _KEYS, _NEEDED, where)
    activation = numbers.get("activation", 0.0)
    if numbers.setdefault("weight_grad", activation) > activation:
        raise ArgumentError(
            f"{where}: weight_grad={numbers['weight_grad']:g} is a part of activation={activation:g}; "
            "give no more than that"
        )
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
    """The entry's numbers by key. Raises ArgumentError for unknown and missing keys, and what is no number."""
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
    # What is deeply nested has no repr, and that of an int may be very long.
    given = f"{where}: {key}={shortened(value):.60}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ArgumentError(f"{given}: expected a number")
    if not value >= 0 or (key == "bandwidth" and not value):
        raise ArgumentError(f"{given}: expected {'above 0' if key == 'bandwidth' else '0 or more'}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    _refuse_extreme(key, number, given)
    return number


def _refuse_extreme(name: str, value: float, given: str) -> None:
    """Refuses what could make a sum or a quotient infinite; `given` is the number as it was given."""
    if value >= _BOUND:
        raise ArgumentError(f"{given}: expected a number below {_BOUND:g}; give it in a larger unit")
    if name == "bandwidth" and 0 < value <= 1 / _BOUND:
        raise ArgumentError(f"{given}: expected a bandwidth above {1 / _BOUND:g}; give sizes in a smaller unit")


def _refuse_unknown(entry: Mapping[str, Any], known: Sequence[str] | Mapping[str, str], where: str) -> None:
    for key in entry:
        if key not in known:
            raise ArgumentError(f"{where}: unknown key {key!r}; known are {', '.join(known)}")


def _name(option: str) -> str:
    return f"--{option.replace('_', '-')}"
