"""The user's choices, per stage, of what it keeps from forward to backward: recomputation and offload."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from penstock._base.errors import ArgumentError
from penstock._base.words import counted
from penstock.runtime.features.context import Recompute
from penstock.runtime.features.feature import Feature

RecomputeChoice = Recompute | Sequence[Recompute] | Mapping[int, Recompute]
"""One for all stages; one for each stage; or by stage number, with "never" for the rest."""

OffloadChoice = bool | Sequence[bool] | Mapping[int, bool]
"""The same forms, with False for the rest."""


def recompute_by_stage(choice: RecomputeChoice, stages: int, policies: Iterable[str]) -> tuple[Recompute, ...]:
    """Each stage's choice.

    Args:
        choice: in any of the three forms.
        stages: the number of stages.
        policies: the known names.

    Raises:
        ArgumentError: a choice is unknown, or is not for these stages.
    """
    found = _per_stage("recompute", choice, stages, "never")
    for each in found:
        _check_recompute(each, tuple(policies))
    return tuple(found)


def offload_by_stage(choice: OffloadChoice, stages: int) -> tuple[bool, ...]:
    """Each stage's choice. Raises ArgumentError if the argument does not fit these stages."""
    found = _per_stage("offload", choice, stages, False)
    for each in found:
        if not isinstance(each, bool):
            raise ArgumentError(f"offload={each!r}: expected True or False, or a list or dict of these, by stage")
    return tuple(found)


def refuse_class(argument: str, given: object) -> None:
    """Raises ArgumentError for a feature's class, where the function that makes one is expected."""
    if isinstance(given, type) and issubclass(given, Feature):
        raise ArgumentError(f"{argument}: {given.__name__} is a class; pass what makes a stage's: {given.__name__}.of")


def _per_stage(name: str, given: Any, stages: int, default: Any) -> list[Any]:
    """Each stage's choice. `given` has one of the three forms."""
    if isinstance(given, Mapping):
        unknown = [stage for stage in given if stage not in range(stages)]
        if unknown:
            raise ArgumentError(f"{name}: there is no stage {unknown[0]!r}; the stages are 0 to {stages - 1}")
        return [given.get(stage, default) for stage in range(stages)]
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != stages:
            raise ArgumentError(
                f"{name} has {counted(len(given), 'entry')}; expected one for each of {stages} stages, or a dict by "
                "stage"
            )
        return list(given)
    return [given] * stages


def _check_recompute(choice: Any, policies: Sequence[str]) -> None:
    if callable(choice):
        refuse_class("recompute", choice)
        return
    is_number = isinstance(choice, int) and not isinstance(choice, bool)
    if not (choice >= 1 if is_number else choice in policies):
        of_peers = {"'full'": "pass 'always'; ", "True": "pass 'always'; ", "False": "pass 'never'; "}
        raise ArgumentError(
            f"recompute={choice!r}: {of_peers.get(repr(choice), '')}expected {', '.join(map(repr, policies))}, an "
            "integer n >= 1 (every n-th layer), a function that makes a feature for a stage, or a list or dict of "
            "these, by stage"
        )
