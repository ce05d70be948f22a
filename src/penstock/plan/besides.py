"""What a rank takes besides what it holds all the time (parameters, gradients, states) and what microbatches keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.balance import UnitCost, counted_again, kept_bytes
from penstock.schedule import Placement


@dataclass(frozen=True, slots=True)
class Besides:
    """Bytes of a stage, or of a rank.

    Attributes:
        working: what a forward or a backward takes while it runs, at most.
        batch: the model's inputs and the loss's target: of a stage, for one microbatch; of a rank, for the whole step,
            since all are there from its beginning.
    """

    working: float
    batch: float

    @classmethod
    def of(cls, units: Sequence[UnitCost]) -> Besides:
        """Those of consecutive units as one stage: while one runs, the later ones keep nothing of this microbatch."""
        kept = kept_bytes(units)
        most = max(before + unit.working_bytes for before, unit in zip(kept, units, strict=True))
        return cls(max(0.0, most - kept[-1]), sum(unit.input_bytes + unit.target_bytes for unit in units))


def besides(placement: Placement, microbatches: int, stages: Sequence[Besides]) -> list[Besides]:
    """Those of each rank, which computes one thing at a time. `stages`: of one copy."""
    depth, found = placement.depth, []
    for own in placement.by_rank:
        batch = sum(stages[stage % depth].batch * len(placement.microbatches_of(stage, microbatches)) for stage in own)
        found.append(Besides(max(stages[stage % depth].working for stage in own), batch))
    return found


def held_again(placement: Placement, pieces: Sequence[Sequence[UnitCost]]) -> list[float]:
    """What the stages of each rank hold too much together, since what is tied is there once. `pieces`: the units of
    each stage of one copy.
    """
    found = []
    for own in placement.by_rank:
        copies: dict[int, list[Sequence[UnitCost]]] = {}
        for stage in own:
            copies.setdefault(stage // placement.depth, []).append(pieces[stage % placement.depth])
        together = (sum(counted_again(unit for piece in each for unit in piece)) for each in copies.values())
        alone = (sum(counted_again(piece)) for each in copies.values() for piece in each)
        found.append(sum(together) - sum(alone))
    return found
