"""What units remember from one call to the next, besides their parameters and buffers.

In a counter, a tensor in an attribute, or a generator, a unit finds what it left there in the previous microbatch. That
works if every call runs once, in order, and on one stage. It fails if two copies of a stage each see part of the batch,
or if a forward is rerun.

Not followed, as no published model needs it: tensors that are no buffers, and are updated in place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from penstock._base.errors import PartitionError


@dataclass(frozen=True, slots=True)
class Remembered:
    """Something that a unit leaves for its own next call.

    Attributes:
        text: where a user finds it.
        unit: the unit's name.
        follows: sizes of kept tensors that follow the number of samples, or of steps, that the unit is given.
    """

    text: str
    unit: str
    follows: frozenset[int] = frozenset()


def refuse_apart(remembered: Remembered, stages: Collection[int]) -> None:
    """Raises PartitionError if a unit that remembers something is called on several stages."""
    if len(stages) > 1:
        raise PartitionError(
            f"{remembered.text} carries something over from one call of {remembered.unit!r} to the next, but these are "
            f"on stages {sorted(stages)}: none would see what the others leave there. Move the cut so that all are on "
            "one stage, or pass it as an argument and return it"
        )


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
        if units is None or each.unit in units:
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
    return Remembered(f"a torch.Generator in {unit!r}", unit)
