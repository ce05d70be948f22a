"""Lists the features in the order in which they apply, and assembles a stage's runner from them.

The user's own follow (`features=`), and a kind of recomputation of the user's own (`recompute=`) takes the place of
Penstock's. One that belongs to Penstock takes a file in `features/` and a line in `FEATURES`; a kind of recomputation,
a line in `RECOMPUTE`; one that only chooses microbatches, a line in `KEPT_FORWARDS` (`features/recompute.py`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx, nn

from penstock._base.words import named
from penstock.errors import ArgumentError
from penstock.runtime.execute.stage_runner import StageRunner
from penstock.runtime.features.checkpointed_norm import CheckpointedNorms
from penstock.runtime.features.compiled import Compiled, OwnGradients
from penstock.runtime.features.context import MakeFeature, StageContext, check_forward_order
from penstock.runtime.features.feature import HOOKS, Feature, Features, Forward, overrides_a_hook
from penstock.runtime.features.finite import FiniteStage
from penstock.runtime.features.forward_attributes import ForwardAttributes
from penstock.runtime.features.offload import Offload
from penstock.runtime.features.recompute import KEPT_FORWARDS, RecomputedStage
from penstock.runtime.features.recomputed_layers import RecomputedLayers
from penstock.runtime.features.sharding import Framed, Reduced
from penstock.runtime.features.step_check import StepCheck
from penstock.runtime.kinds import distinct
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.runtime.transport.routes import RouteBuilder
from penstock.schedule import Op

RECOMPUTE: Mapping[str, MakeFeature] = {
    "never": lambda stage: None,
    **{name: RecomputedStage.keeping(kept) for name, kept in KEPT_FORWARDS.items()},
}
"""Kinds of recomputation, by their names in `recompute=`. A number is `RecomputedLayers`."""


def _recomputed(stage: StageContext) -> Feature | None:
    kind = stage.recompute
    if not stage.training or isinstance(kind, int):
        return None
    return RECOMPUTE[kind](stage) if isinstance(kind, str) else _own("recompute", kind, stage)


FEATURES: tuple[MakeFeature, ...] = (
    RecomputedLayers.of,  # replaces the stage's code, which all later features see
    Offload.of,
    _recomputed,
    Compiled.of,
    OwnGradients.of,
    FiniteStage.of,
    check_forward_order,
    Framed.of,  # around whatever runs the code
    Reduced.of,
    lambda stage: stage.binding.norms,
    ForwardAttributes.of,
    CheckpointedNorms.of,  # exchanges buffers within a backward, in which nothing else may update them
    StepCheck.of,
)
"""All features of Penstock, the outermost first."""


def assemble(stage: StageContext, routes: RouteBuilder) -> StageRunner:
    """The runner of a stage, with its features.

    Raises:
        ArgumentError: two choices cannot be combined.
        PartitionError: the stage does something that the schedule, or a choice, does not allow.
    """
    own: list[MakeFeature] = [partial(_own, "features", make) for make in stage.binding.features]
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


def _own(argument: str, make: MakeFeature, stage: StageContext) -> Feature | None:
    """What the user's function makes for a stage.

    Raises:
        ArgumentError: it is not a feature, or one that would do nothing.
    """
    name = named(make).__qualname__
    try:
        feature = make(stage)
    except Exception as error:
        error.add_note(f"penstock: while {argument}= called {name} with the StageContext of stage {stage.index}")
        raise
    if not (feature is None or isinstance(feature, Feature)):
        raise ArgumentError(
            f"{argument}: {name} made an object of {type(feature).__name__} for stage {stage.index}; "
            "expected one of a class derived from penstock.runtime.features.feature.Feature, or None"
        )
    if feature is not None and not overrides_a_hook(feature):  # a misspelt one would go unnoticed
        raise ArgumentError(
            f"{argument}: {type(feature).__name__}, which {name} made for stage {stage.index}, overrides no hook of "
            f"Feature, so it would do nothing; the hooks are {', '.join(HOOKS)}. To leave a stage without it, return "
            "None"
        )
    return feature


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
