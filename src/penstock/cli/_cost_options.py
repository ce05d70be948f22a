"""The options for what stages and links cost: numbers that apply to all stages, or files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import typer

from penstock._base.errors import ArgumentError
from penstock.cli._options import options_on
from penstock.cli._target import compute_as_ranks, link_of, profile_target, profiles_of
from penstock.costs import WORK, Costs, MeasuredLinks, links_in, read_costs, read_links, units_of
from penstock.costs.links import assumed, usual_link
from penstock.simulate import Links
from penstock.simulate.costs import LinkCost, StageCost, refuse_extreme

EPILOG = "\n\n".join(
    (
        "--profile FILE takes what `penstock profile --json` measured, in seconds and bytes, and cuts it into as many "
        "stages as the schedule has, as a pipeline cuts by itself. A TARGET is measured first; with both, the profile "
        "must be the TARGET's. Messages take what --links, --comm and --bandwidth say, or what the profile measured "
        "between ranks, or else as much as `penstock plan` assumes.",
        "--costs FILE gives each stage its own costs, as a JSON list with one object per stage:",
        '[{"forward": 10, "backward_input": 11, "backward_weight": 9}, ...]',
        "with output_bytes, activation, weight_grad, parameters, gradients, optimizer, unsharded (whole parameters, "
        "while they are gathered) and overlapped (the time of a forward and a backward that overlap), if you know "
        "them. A list of numbers in place of one is a cost for each microbatch. To add links:",
        '{"stages": [...], "links": {"latency": 1, "bandwidth": 100}}',
        'or, if each pair of ranks has its own, "links": [{"from": 0, "to": 1, "latency": 1}, ...].',
        '--links FILE is what `penstock fabric` writes: the links it measured, and under "all" one for every other '
        "pair. All costs are then in seconds and bytes.",
    )
)
"""Printed below the options of a verb that takes costs."""


_option = options_on("Costs: of one microbatch on one stage, in any one unit")


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What stages and links cost. None means not given."""

    forward: Annotated[
        float | None, _option("Forward time (F). Of F, I and W, missing values default to a given one, or to 1.")
    ] = None
    backward_input: Annotated[float | None, _option("I, the backward that gives the input's gradient.")] = None
    backward_weight: Annotated[
        float | None, _option("W, the backward that gives the weights' gradient. B is I + W.")
    ] = None
    comm: Annotated[float | None, _option("How long a message between two ranks takes; default 0.")] = None
    output_bytes: Annotated[
        float | None, _option("The size of such a message; with --bandwidth it takes size / bandwidth longer.")
    ] = None
    bandwidth: Annotated[
        float | None, _option("The bandwidth of each link between two ranks, in size per unit of time.")
    ] = None
    memory_activation: Annotated[
        float | None, _option("What F keeps for the backward, in any unit; otherwise an activation counts as 1.")
    ] = None
    memory_weight_grad: Annotated[
        float | None, _option("What stays from I until W if the backward is split; default all of it.")
    ] = None
    memory_unsharded: Annotated[
        float | None, _option("What a stage's whole parameters take while they are gathered; see --unshard-window.")
    ] = None
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[TARGET]",
            help="Instead of costs: a model to be measured here, module:function, file.py:function or hf:config.json.",
        ),
    ] = None
    profile: Annotated[
        Path | None,
        _option("Instead of the above: what `penstock profile` measured, cut into stages; see below.", metavar="FILE"),
    ] = None
    rows: Annotated[
        int | None,
        _option("With a profile or TARGET: the rows of a microbatch; default the profile's, or the batch's share."),
    ] = None
    costs: Annotated[
        Path | None, _option("Each stage's own costs, instead of the above; see below.", metavar="FILE")
    ] = None
    links: Annotated[
        Path | None,
        _option("A measured network's links, instead of --comm and --bandwidth; see below.", metavar="FILE"),
    ] = None

    link: Annotated[
        str | None,
        _option('Each link between two ranks, instead: "40gbit delay 30us", as for plan; costs are seconds and bytes.'),
    ] = None

    def read(self, microbatches: int | None = None, ranks: str | None = None) -> Costs:
        """The costs from the options or the file, or measured.

        Args:
            microbatches: how many the batch of a TARGET is cut into; None: as usual.
            ranks: a TARGET is measured with the threads that each of so many gets; other text: with those of now.

        Raises:
            ArgumentError: a cost is negative, an option needs another that is missing, both options and a file are
                given, or the file cannot be read, or is of something else than TARGET.
        """
        given = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NO_COSTS}
        given = {name: value for name, value in given.items() if value is not None}
        if self.links is not None and (twice := [name for name in ("comm", "bandwidth") if name in given]):
            raise ArgumentError(
                f"--links {self.links}: the file already sets what {_name(twice[0])} would; pass only one of the two"
            )
        if self.link is not None:
            also = [] if self.links is None else ["links"]
            if also := [*also, *(name for name in ("comm", "bandwidth") if name in given)]:
                raise ArgumentError(f"--link {self.link!r} and {_name(also[0])} say the same; pass only one of the two")
        if self.rows is not None and not self._measured_where:
            raise ArgumentError(f"--rows {self.rows} is for measured costs: pass --profile or a TARGET too")
        if self.costs is not None:
            if self._measured_where:
                raise ArgumentError(
                    f"--costs {self.costs}: {self._measured_where} has costs too; pass only one of them"
                )
            if given:
                raise ArgumentError(
                    f"--costs {self.costs}: the file already sets what {_name(next(iter(given)))} would"
                )
            costs = read_costs(self.costs)
        elif self._measured_where:
            costs = self._measured(given, microbatches, ranks)
        else:
            costs = self._from_numbers(given)
        if self.links is not None:
            costs = costs.with_links(read_links(self.links))
        elif self.link is not None:
            costs = costs.with_links(MeasuredLinks({}, link_of(self.link), f"--link {self.link!r}"))
        return costs

    @property
    def _no_links(self) -> bool:
        """Whether neither a file nor --link says what messages cost."""
        return self.links is None and self.link is None

    @property
    def _measured_where(self) -> str:
        """Where measured costs come from, as it was typed; empty if costs are not measured."""
        return f"--profile {self.profile}" if self.profile is not None else self.target or ""

    def _measured(self, given: Mapping[str, float], microbatches: int | None, ranks: str | None) -> Costs:
        _check(given)
        if stated := [name for name in given if name not in ("comm", "bandwidth")]:
            raise ArgumentError(
                f"{_name(stated[0])} {given[stated[0]]:g}: {self._measured_where} says it for every stage; pass only "
                "one of the two"
            )
        if self.target is not None and ranks is not None and ranks.isdecimal() and int(ranks):
            compute_as_ranks(int(ranks))
        asked = {"microbatches": microbatches} if self.rows is None else {"microbatch_sizes": [self.rows]}
        files = [] if self.profile is None else [self.profile]
        (found,) = profiles_of(self.target, files, lambda given: [profile_target(given, **asked)])
        units = units_of(found, self.rows, self._measured_where)
        links: Links = LinkCost(given.get("comm", 0.0), given.get("bandwidth", math.inf))
        if not given and self._no_links:
            links = links_in(found, self._measured_where)
            if not found.links:
                links = usual_link(found.device)
                units = replace(units, said=f"{units.said}; links not measured: {assumed(links)}")
        return Costs(units, links, has_memory=True, source=self._measured_where)

    def _from_numbers(self, given: Mapping[str, float]) -> Costs:
        _check(given)
        for name, other in (("output_bytes", "bandwidth"), ("bandwidth", "output_bytes")):
            if name in given and other not in given and self._no_links:
                raise ArgumentError(f"{_name(name)} has no effect without {_name(other)}; pass both")
        activation = given.get("memory_activation", 0.0)
        weight_gradient = given.get("memory_weight_grad", activation)
        if weight_gradient and "memory_activation" not in given:
            raise ArgumentError(
                f"--memory-weight-grad {weight_gradient:g} has no effect without --memory-activation; pass both"
            )
        said = [name for name in WORK if name in given]
        usual = given[said[0]] if said else 1.0
        forward, backward_input, backward_weight = (given.get(name, usual) for name in WORK)
        output = given.get("output_bytes", 0.0)
        times = (forward, backward_input, backward_weight)
        unsharded = given.get("memory_unsharded", 0.0)
        stage = StageCost(*times, output, activation, weight_gradient, unsharded_bytes=unsharded)
        link = LinkCost(given.get("comm", 0.0), given.get("bandwidth", math.inf))
        in_units = not self._no_links or any(name in given for name in (*WORK, "comm", "bandwidth"))
        assumed = {name: usual for name in WORK if in_units and name not in given}
        return Costs(
            stage, link, has_memory=bool({"memory_activation", "memory_unsharded"} & given.keys()), assumed=assumed
        )


_NO_COSTS = ("target", "profile", "rows", "costs", "links", "link")
"""The options that are no numbers of a cost."""


def _check(given: Mapping[str, float]) -> None:
    for name, value in given.items():
        if not value >= 0:
            raise ArgumentError(f"{_name(name)} {value:g}: expected a cost of 0 or more")
        refuse_extreme(name, value, f"{_name(name)} {value:g}")
    if given.get("bandwidth") == 0:
        raise ArgumentError("--bandwidth 0: expected a bandwidth above 0")


def _name(option: str) -> str:
    return f"--{option.replace('_', '-')}"
