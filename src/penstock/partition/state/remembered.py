"""What units remember from one call to the next, besides their parameters and buffers.

In a counter, a queue of features in a tensor that is not a buffer, or a generator, a unit finds what it left there in
the previous microbatch. That works if every call runs once, in order, and all units that use it are on one stage. It
fails if two copies of a stage each see part of the batch, or if a forward is rerun.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import CellType
from typing import Any

from torch import Tensor

from penstock.compat import storage_of
from penstock.errors import PartitionError
from penstock.partition.state.provenance import Provenance, Stray
from penstock.partition.state.reach import Holder, Reach


@dataclass(frozen=True, slots=True)
class Remembered:
    """Something that a unit changes and that it or another unit reads.

    Attributes:
        text: where a user finds it.
        units: the units that use it.
        storage: the memory of a tensor, which calls outside the units may also use; None for anything else.
        changed, used: where in the user's code it is changed and used.
        follows: sizes of kept tensors that follow the number of samples, or of steps, that the unit is given.
    """

    text: str
    units: frozenset[str]
    storage: int | None = None
    changed: str = ""
    used: str = ""
    follows: frozenset[int] = frozenset()

    def refusal(self, stages: Collection[int]) -> PartitionError:
        """The error for something that is used on several stages."""
        return PartitionError(
            f"{self.text} is updated in place in {self.changed}, and used in {self.used}, which are on stages "
            f"{sorted(stages)}: none would see what the others write there. Move the cut so that all its uses are on "
            "one stage, or pass it as an argument and return it"
        )


def strays(provenance: Provenance, reach: Reach) -> list[Remembered]:
    """The tensors that existed before the forward, are neither parameters nor buffers, and are updated by it."""
    found = [stray for stray in provenance.strays.values() if stray.writer is not None]
    return [_remembered(stray, reach) for stray in found]


def _remembered(stray: Stray, reach: Reach) -> Remembered:
    assert stray.writer is not None
    others = [made for scope, made in stray.users.items() if scope != stray.writer.unit]
    return Remembered(
        _text(stray, reach),
        frozenset(scope for scope in stray.users if scope),
        stray.root,
        str(stray.writer),
        str(others[0] if others else stray.writer),
    )


def _text(stray: Stray, reach: Reach) -> str:
    for place in reach.places:
        for key, value in _entries(place):
            if isinstance(value, Tensor) and storage_of(value) == stray.root:
                return f"{place.name(key)!r}, a tensor that is not a buffer,"
    return f"a tensor of shape {stray.shape} that is not a buffer"


def _entries(place: Holder) -> Sequence[tuple[Any, Any]]:
    if isinstance(place.before, dict):
        return list(place.before.items())
    if isinstance(place.entries, CellType):
        return [(None, place.before)]
    return [(key, value) for key, value in enumerate(place.before)] if type(place.before) is list else []


def refuse_copies(index: int, remembered: Sequence[Remembered], pipelines: int) -> None:
    """Raises PartitionError if a stage with several copies remembers something."""
    for each in remembered:
        raise PartitionError(
            f"{each.text} of stage {index} carries something over from one microbatch to the next, but this schedule "
            f"runs {pipelines} copies of the stage, each of which would see only part of the batch; use a schedule "
            "with one copy (dualpipe-v for dualpipe)"
        )


def refuse_again(index: int, remembered: Sequence[Remembered], units: Collection[str] | None = None) -> None:
    """Raises PartitionError if a forward that is rerun remembers something.

    Args:
        units: the units that are rerun; None: the whole stage.
    """
    for each in remembered:
        if units is None or not each.units.isdisjoint(units):
            raise PartitionError(
                f"recompute: {each.text} of stage {index} carries something over from one microbatch to the next, so "
                f"that running a forward again would give something else; choose recompute={{{index}: 'never'}}"
            )


def refuse_samples(remembered: Iterable[Remembered], sizes: Sequence[int]) -> None:
    """Raises PartitionError if a block keeps tensors with a row for each sample (the state of a recurrent layer that is
    trained over steps): the next microbatch, whose samples are others, would begin with them.

    Args:
        sizes: how many samples each microbatch has.
    """
    for each in remembered if len(sizes) > 1 else ():
        if not each.follows.isdisjoint(sizes):
            raise PartitionError(
                f"{each.text} holds tensors with a row for each of a microbatch's samples, with which the next "
                "microbatch, of other samples, would begin. Pass such state in and out: take it as an input, which is "
                "cut like the batch, and return it with the result; or set microbatches=1"
            )


def draws_alone(unit: str) -> Remembered:
    """A unit's own generator."""
    return Remembered(f"a torch.Generator in {unit!r}", frozenset({unit}))
