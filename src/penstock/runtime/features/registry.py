"""Lists the features in the order in which they apply.

The user's own follow (`features=`), and a kind of recomputation of the user's own (`recompute=`) takes the place of
Penstock's. One that belongs to Penstock takes a file beside this one and a line in `FEATURES`; a kind of recomputation,
a line in `RECOMPUTE`; one that only chooses microbatches, a line in `KEPT_FORWARDS` (`recompute.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock._base.errors import ArgumentError
from penstock._base.words import named
from penstock.runtime.features.checkpointed_norm import CheckpointedNorms
from penstock.runtime.features.compiled import Compiled, OwnGradients
from penstock.runtime.features.context import MakeFeature, StageContext, check_forward_order
from penstock.runtime.features.feature import HOOKS, Feature, overrides_a_hook
from penstock.runtime.features.finite import FiniteStage
from penstock.runtime.features.forward_attributes import ForwardAttributes
from penstock.runtime.features.offload import Offload
from penstock.runtime.features.recompute import KEPT_FORWARDS, RecomputedStage
from penstock.runtime.features.recomputed_layers import RecomputedLayers
from penstock.runtime.features.sharding import Framed, Reduced
from penstock.runtime.features.step_check import StepCheck

RECOMPUTE: Mapping[str, MakeFeature] = {
    "never": lambda stage: None,
    **{name: RecomputedStage.keeping(kept) for name, kept in KEPT_FORWARDS.items()},
}
"""Kinds of recomputation, by their names in `recompute=`. A number is `RecomputedLayers`."""


def _recomputed(stage: StageContext) -> Feature | None:
    kind = stage.recompute
    if not stage.training or isinstance(kind, int):
        return None
    return RECOMPUTE[kind](stage) if isinstance(kind, str) else own_feature("recompute", kind, stage)


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


def own_feature(argument: str, make: MakeFeature, stage: StageContext) -> Feature | None:
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
