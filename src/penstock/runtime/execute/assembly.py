"""Assembles a stage's runner from its features: those of `features/registry.py`, and the user's own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from penstock.runtime.execute.stage_runner import StageRunner
from penstock.runtime.features.context import MakeFeature, StageContext
from penstock.runtime.features.feature import Features, Forward
from penstock.runtime.features.offload import Offload
from penstock.runtime.features.registry import FEATURES, own_feature
from penstock.runtime.kinds import distinct
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.runtime.transport.routes import RouteBuilder
from penstock.schedule import Op


def assemble(stage: StageContext, routes: RouteBuilder) -> StageRunner:
    """The runner of a stage, with its features.

    Raises:
        ArgumentError: two choices cannot be combined.
        PartitionError: the stage does something that the schedule, or a choice, does not allow.
    """
    own: list[MakeFeature] = [partial(own_feature, "features", make) for make in stage.binding.features]
    for make in (*FEATURES, *own):
        feature = make(stage)
        if feature is not None:
            stage = replace(stage, stages=feature.rewrite(stage.stages), made=(*stage.made, feature))
    runs: list[Forward] = []
    for each in stage.stages:
        run: Forward = each.module.forward
        for feature in stage.made:
            run = feature.forward_of(run, each)
        runs.append(run)
    return StageRunner(stage, runs, routes, _splits(stage), Features(stage.made))


def _splits(stage: StageContext) -> list[SplitBackward | None]:
    """What runs the split backward of each microbatch; None for one that is not split.

    Microbatches that use the stage's weights differently have one each, which learns from the first of them what can
    wait for W.
    """
    split = {*stage.microbatches(Op.I)}
    partitions = stage.binding.partitions
    uses = {id(each): _weight_uses(each.stages[stage.index].module) for each in distinct(partitions)}
    ways = [(kind, uses[id(each)]) for kind, each in zip(stage.binding.kinds.of, partitions, strict=True)]
    first = {way: microbatch for microbatch, way in reversed([*enumerate(ways)]) if microbatch in split}
    own = {way: _split(stage, microbatch, alike=len({*ways}) == 1) for way, microbatch in first.items()}
    return [own[way] if k in split else None for k, way in enumerate(ways)]


def _split(stage: StageContext, first: int, *, alike: bool) -> SplitBackward:
    in_order = stage.in_order(Op.F) and stage.in_order(Op.B, Op.I)
    return SplitBackward(
        stage.parameters,
        stage.binding.partitions[first].stages[stage.index].module,
        stage.device,
        in_order=in_order and alike,
        keeper=next((feature for feature in stage.made if isinstance(feature, Offload)), None),
        compiled=stage.binding.compile is not None,
    )


def _weight_uses(module: nn.Module) -> Hashable:
    """Return a key that is equal for recorded forwards that use weights alike: the calls that get a weight, and their
    plain arguments, since a unit may branch on those. Names of values, which are numbered, are not in it."""
    if not isinstance(module, fx.GraphModule):
        return type(module).__qualname__
    weights = dict(module.named_parameters(remove_duplicate=False))
    units = {name[:end] for name in weights for end, letter in enumerate(name) if letter == "."}
    held = {node: str(node.target) for node in module.graph.nodes if node.op == "get_attr" and node.target in weights}

    def plain(argument: fx.Node) -> Any:
        return held.get(argument, "")

    return tuple(
        (node.op, str(node.target), repr(fx.node.map_arg((node.args, node.kwargs), plain)))
        for node in module.graph.nodes
        if (node.op == "call_module" and node.target in units) or any(each in held for each in node.all_input_nodes)
    )
