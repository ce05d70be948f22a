"""What a user chooses about what stages keep from forward to backward: recomputation and offload, a choice a stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from penstock.errors import ArgumentError
from penstock.schedule import Op, Schedule

Policy = Literal["never", "except_last", "always"]

Recompute = Policy | int
"""Which forwards of a stage are run again in backward, so that what they computed need not be kept.

"always": the whole stage, of every microbatch; only what enters the stage is kept. "except_last": likewise, but for the
last microbatch that the stage runs. A number n: of every microbatch, the stage's layers 0, n, 2n, ..., each just before
its own backward; only what enters those layers is kept, and all that the others compute. A layer is a module with
parameters that the stage's code calls as a whole.
"""

RecomputeChoice = Recompute | Sequence[Recompute] | Mapping[int, Recompute]
"""One for all stages; one for each stage; or by the number of the stage, and "never" on others."""

OffloadChoice = bool | Sequence[bool] | Mapping[int, bool]
"""Likewise, and False on others."""


@dataclass(frozen=True, slots=True)
class Keeping:
    """What one stage does to keep less between forward and backward.

    Attributes:
        recompute: see `Recompute`.
        offload: what backward needs goes to the host's memory meanwhile.
    """

    recompute: Recompute = "never"
    offload: bool = False

    @property
    def every(self) -> int | None:
        """Which layers run again: every n-th; None where it is none, or the whole stage."""
        return self.recompute if isinstance(self.recompute, int) else None


def keepings(recompute: RecomputeChoice, offload: OffloadChoice, stages: int) -> tuple[Keeping, ...]:
    """The choices of each stage.

    Raises:
        ArgumentError: a choice is unknown, or is not for these stages.
    """
    policies = _per_stage("recompute", recompute, stages, "never")
    places = _per_stage("offload", offload, stages, False)
    for policy in policies:
        _check_recompute(policy)
    for place in places:
        _check_offload(place)
    return tuple(Keeping(policy, place) for policy, place in zip(policies, places, strict=True))


def notes(chosen: Sequence[Keeping], order: Schedule) -> list[str]:
    """What the choices cost, in words."""
    split = sorted({action.stage for row in order.rows for action in row if action.op is Op.I})
    return [
        f"stage {stage}: with offload its backward is not split; its I's do all of it, and its W's are empty"
        for stage in split
        if chosen[stage % len(chosen)].offload
    ]


def _per_stage(name: str, given: Any, stages: int, default: Any) -> list[Any]:
    """The choice of each stage; `given` in one of the three forms."""
    if isinstance(given, Mapping):
        unknown = [stage for stage in given if stage not in range(stages)]
        if unknown:
            raise ArgumentError(f"{name}: there is no stage {unknown[0]!r}; the stages are 0 to {stages - 1}")
        return [given.get(stage, default) for stage in range(stages)]
    if isinstance(given, Sequence) and not isinstance(given, str):
        if len(given) != stages:
            raise ArgumentError(
                f"{name} has {len(given)} entries; expected one for each of {stages} stages, or a dict by stage"
            )
        return list(given)
    return [given] * stages


def _check_recompute(choice: Any) -> None:
    is_number = isinstance(choice, int) and not isinstance(choice, bool)
    if not (choice >= 1 if is_number else choice in get_args(Policy)):
        raise ArgumentError(
            f"recompute={choice!r}: expected {', '.join(map(repr, get_args(Policy)))}, a whole number n of at least 1 "
            "(every n-th layer), or a list or dict of these, by stage"
        )


def _check_offload(choice: Any) -> None:
    if not isinstance(choice, bool):
        raise ArgumentError(f"offload={choice!r}: expected True or False, or a list or dict of these, by stage")
