"""Options for the costs of stages and links: numbers that apply to all stages, or files."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path

from penstock._base.errors import ArgumentError
from penstock.cli._errors import flag
from penstock.cli._options import argument, options_on
from penstock.cli._target import compute_as_ranks, load_profiles, parse_link_cost, profile_target
from penstock.costs import WORK, Costs, MeasuredLinks, links_in, read_costs, read_links, units_of
from penstock.costs.links import describe_link, usual_link
from penstock.simulate import Links
from penstock.simulate.costs import LinkCost, StageCost, check_bandwidth, check_cost

EPILOG = "\n\n".join(
    (
        "--profile FILE takes what `penstock profile --out` measured, in seconds and bytes, and cuts it into the "
        "schedule's stages, as a pipeline cuts by default. A TARGET is measured first; with both, the profile must be "
        "the TARGET's. Message costs come from --links, --link-latency and --bandwidth, or from the links that the "
        "profile measured, or are assumed as in `penstock plan`.",
        "--costs FILE sets the costs of each stage, as a JSON list with one object per stage:",
        '[{"forward": 10, "backward_input": 11, "backward_weight": 9}, ...]',
        "Optional keys: output_bytes, activation, weight_grad, parameters, gradients, optimizer, unsharded (gathered "
        "parameters) and overlapped (the time of a forward and a backward that overlap). A list of numbers in place of "
        "one is a cost per microbatch. To add links:",
        '{"stages": [...], "links": {"latency": 1, "bandwidth": 100}}',
        'or, if each pair of ranks has its own, "links": [{"from": 0, "to": 1, "latency": 1}, ...].',
        '--links FILE is the output of `penstock fabric`: the links it measured, and under "all" one for every other '
        "pair. All costs are then in seconds and bytes.",
    )
)
"""Epilog of the help of commands that take costs."""


_option = options_on("Costs of one microbatch on one stage, in any one unit")


@dataclass(frozen=True, slots=True)
class CostOptions:
    """Costs of stages and links; None if an option was omitted."""

    forward: float | None = _option("Forward time (F). Of F, I and W, missing values default to a given one, or to 1.")
    backward_input: float | None = _option("I, the input-gradient backward.")
    backward_weight: float | None = _option("W, the weight-gradient backward. B is I + W.")
    link_latency: float | None = _option("Latency of a message between two ranks; default 0.")
    output_bytes: float | None = _option("Size of a message; with --bandwidth it takes size / bandwidth longer.")
    bandwidth: float | None = _option("Bandwidth of each link between two ranks, in size per unit of time.")
    memory_activation: float | None = _option("Activations of one F, in any unit; otherwise they count as 1.")
    memory_weight_grad: float | None = _option("Activations kept from I until W if the backward is split; default all.")
    memory_unsharded: float | None = _option("A stage's gathered (unsharded) parameters; see --unshard-window.")
    target: str | None = argument(
        "Model to measure here instead of passing costs: module:function, file.py:function or hf:config.json.",
        metavar="[TARGET]",
    )
    profile: Path | None = _option(
        "Output of `penstock profile`, cut into stages, instead of the above; see below.", metavar="FILE"
    )
    microbatch_size: int | None = _option(
        "Samples per microbatch, with a profile or TARGET; default: the profile's, or the batch's share."
    )
    costs: Path | None = _option("Costs per stage, instead of the above; see below.", metavar="FILE")
    links: Path | None = _option(
        "Links of a measured network, instead of --link-latency and --bandwidth; see below.", metavar="FILE"
    )
    link: str | None = _option(
        'Every link between two ranks, instead: "40gbit delay 30us", as for plan; costs are in seconds and bytes.'
    )

    def read(self, microbatches: int | None = None, ranks: str | None = None) -> Costs:
        """Return the costs. A TARGET is measured with its batch cut into `microbatches`, and with the threads that each
        of `ranks` has (if that is a number)."""
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in _NO_COSTS}
        values = {name: value for name, value in values.items() if value is not None}
        for name, value in values.items():
            (check_bandwidth if name == "bandwidth" else check_cost)(name, value)
        source = f"--profile {self.profile}" if self.profile is not None else self.target or ""
        self._check_conflicts(values, source)
        if self.costs is not None:
            costs = read_costs(self.costs)
        elif source:
            costs = self._measured(values, source, microbatches, ranks)
        else:
            costs = self._from_numbers(values)
        if self.links is not None:
            return costs.with_links(read_links(self.links))
        if self.link is not None:
            return costs.with_links(MeasuredLinks({}, parse_link_cost(self.link), f"--link {self.link!r}"))
        return costs

    def _check_conflicts(self, values: Mapping[str, float], source: str) -> None:
        """Raise ArgumentError if two options set the same cost, or --microbatch-size has no profile."""
        stage_options = [flag(name) for name in values if name not in _LINK_COSTS]
        link_options = [flag(name) for name in values if name in _LINK_COSTS]
        for value, option, conflicts in (
            (self.costs, f"--costs {self.costs}", [source, *stage_options, *link_options]),
            (source or None, source, stage_options),
            (self.links, f"--links {self.links}", link_options),
            (self.link, f"--link {self.link!r}", ["--links" if self.links else "", *link_options]),
        ):
            if value is not None and (conflict := next(filter(None, conflicts), None)):
                raise ArgumentError(f"{option} already sets what {conflict} would; pass only one of the two")
        if self.microbatch_size is not None and not source:
            raise ArgumentError(
                f"--microbatch-size {self.microbatch_size} is for measured costs: pass --profile or a TARGET too"
            )

    def _measured(self, values: Mapping[str, float], source: str, microbatches: int | None, ranks: str | None) -> Costs:
        if self.target is not None and ranks is not None and ranks.isdecimal() and int(ranks):
            compute_as_ranks(int(ranks))
        size = self.microbatch_size
        batch = {"microbatches": microbatches} if size is None else {"microbatch_sizes": [size]}
        files = [] if self.profile is None else [self.profile]
        (profile,) = load_profiles(self.target, files, lambda target: [profile_target(target, **batch)])
        units = units_of(profile, size, source)
        links: Links = _link(values)
        if not values and self.links is None and self.link is None:
            links = links_in(profile, source)
            if not profile.links:
                links = usual_link(profile.device)
                units = replace(units, description=f"{units.description}; links not measured: {describe_link(links)}")
        return Costs(units, links, has_memory=True, source=source)

    def _from_numbers(self, values: Mapping[str, float]) -> Costs:
        has_links = self.links is not None or self.link is not None
        needs = {"memory_weight_grad": "memory_activation"}
        if not has_links:
            needs |= {"output_bytes": "bandwidth", "bandwidth": "output_bytes"}
        for name, required in needs.items():
            if name in values and required not in values:
                raise ArgumentError(f"{flag(name)} has no effect without {flag(required)}; pass both")
        default = next((values[name] for name in WORK if name in values), 1.0)
        activation = values.get("memory_activation", 0.0)
        weight_grad, unsharded = values.get("memory_weight_grad", activation), values.get("memory_unsharded", 0.0)
        forward, backward_input, backward_weight = (values.get(name, default) for name in WORK)
        times = (forward, backward_input, backward_weight)
        output = values.get("output_bytes", 0.0)
        stage = StageCost(*times, output, activation, weight_grad, unsharded_bytes=unsharded)
        in_units = has_links or not values.keys().isdisjoint({*WORK, *_LINK_COSTS})
        assumed = {name: default for name in WORK if in_units and name not in values}
        has_memory = not values.keys().isdisjoint({"memory_activation", "memory_unsharded"})
        return Costs(stage, _link(values), has_memory, assumed=assumed)


_NO_COSTS = ("target", "profile", "microbatch_size", "costs", "links", "link")
"""Options that are not numeric costs."""
_LINK_COSTS = ("link_latency", "bandwidth")


def _link(values: Mapping[str, float]) -> LinkCost:
    return LinkCost(values.get("link_latency", 0.0), values.get("bandwidth", math.inf))
