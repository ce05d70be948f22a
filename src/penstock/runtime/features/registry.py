"""Lists the features in the order in which they apply, and reads the user's choices for each stage.

The user's own follow (`features=`), and a kind of recomputation of the user's own (`recompute=`) takes the place of
Penstock's. One that belongs to Penstock takes a file beside this one and a line in `FEATURES`; a kind of recomputation,
a line in `RECOMPUTE`; one that only chooses microbatches, a line in `KEPT_FORWARDS` (`recompute.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.formatting import named, pluralize
from penstock.runtime.features.compiled import Compiled, SeparateGradients
from penstock.runtime.features.deferred_norm import CheckpointedNorms
from penstock.runtime.features.feature import (
    HOOKS,
    Feature,
    MakeFeature,
    Recompute,
    StageContext,
    check_forward_order,
    overrides_a_hook,
)
from penstock.runtime.features.finite import FiniteStage
from penstock.runtime.features.forward_attributes import ForwardAttributes
from penstock.runtime.features.frame import FramedCode, ShardedReduction
from penstock.runtime.features.offload import Offload
from penstock.runtime.features.recompute import KEPT_FORWARDS, RecomputedLayers, RecomputedStage
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
    return RECOMPUTE[kind](stage) if isinstance(kind, str) else make_user_feature("recompute", kind, stage)


FEATURES: tuple[MakeFeature, ...] = (
    RecomputedLayers.of,  # replaces the stage's code, which all later features see
    Offload.of,
    _recomputed,
    Compiled.of,
    SeparateGradients.of,
    FiniteStage.of,
    check_forward_order,
    FramedCode.of,  # around whatever runs the code
    ShardedReduction.of,
    lambda stage: stage.binding.norms,
    ForwardAttributes.of,
    CheckpointedNorms.of,  # exchanges buffers within a backward, in which nothing else may update them
    StepCheck.of,
)
"""All features of Penstock, the outermost first."""


def make_user_feature(argument: str, make: MakeFeature, stage: StageContext) -> Feature | None:
    """Return what the user's function makes for a stage.

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


RecomputeChoice = Recompute | Sequence[Recompute] | Mapping[int, Recompute]
"""One for all stages; one for each stage; or by stage number, with "never" for the rest."""

OffloadChoice = bool | Sequence[bool] | Mapping[int, bool]
"""The same forms, with False for the rest."""


def recompute_by_stage(choice: RecomputeChoice, stages: int) -> tuple[Recompute, ...]:
    """Return each stage's recomputation.

    Args:
        choice: in any of the three forms.
        stages: the number of stages.

    Raises:
        ArgumentError: a choice is unknown, or is not for these stages.
    """
    by_stage = _per_stage("recompute", choice, stages, "never")
    for stage_choice in by_stage:
        _check_recompute(stage_choice)
    return tuple(by_stage)


def offload_by_stage(choice: OffloadChoice, stages: int) -> tuple[bool, ...]:
    """Return whether each stage offloads. Raise ArgumentError if the argument does not fit these stages."""
    by_stage = _per_stage("offload", choice, stages, False)
    for value in by_stage:
        if not isinstance(value, bool):
            raise ArgumentError(f"offload={value!r}: expected True or False, or a list or dict of these, by stage")
    return tuple(by_stage)


def check_not_class(argument: str, value: object) -> None:
    """Raise ArgumentError for a feature's class, where the function that makes one is expected."""
    if isinstance(value, type) and issubclass(value, Feature):
        raise ArgumentError(f"{argument}: {value.__name__} is a class; pass what makes a stage's: {value.__name__}.of")


def _per_stage(name: str, choice: Any, stages: int, default: Any) -> list[Any]:
    """Return each stage's choice. `choice` has one of the three forms."""
    if isinstance(choice, Mapping):
        unknown = [stage for stage in choice if stage not in range(stages)]
        if unknown:
            raise ArgumentError(f"{name}: there is no stage {unknown[0]!r}; the stages are 0 to {stages - 1}")
        return [choice.get(stage, default) for stage in range(stages)]
    if isinstance(choice, Sequence) and not isinstance(choice, str):
        if len(choice) != stages:
            raise ArgumentError(
                f"{name} has {pluralize(len(choice), 'entry')}; expected one for each of {stages} stages, or a dict by "
                "stage"
            )
        return list(choice)
    return [choice] * stages


def _check_recompute(choice: Any) -> None:
    if callable(choice):
        check_not_class("recompute", choice)
        return
    is_number = isinstance(choice, int) and not isinstance(choice, bool)
    if not (choice >= 1 if is_number else choice in [*RECOMPUTE]):
        hints = {"'full'": "pass 'always'; ", "True": "pass 'always'; ", "False": "pass 'never'; "}
        raise ArgumentError(
            f"recompute={choice!r}: {hints.get(repr(choice), '')}expected {', '.join(map(repr, RECOMPUTE))}, an "
            "integer n >= 1 (every n-th layer), a function that makes a feature for a stage, or a list or dict of "
            "these, by stage"
        )
