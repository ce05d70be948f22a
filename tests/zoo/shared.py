"""Verification of one model under many schedules: what its runs have in common is made once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

import penstock
from penstock._base.pytree import flatten
from penstock.partition import partitioner
from penstock.partition.given_model import Chain
from penstock.partition.stages.partition import describe
from penstock.runtime.batch.cut import Microbatch
from penstock.schedule import Schedule
from penstock.verification import verify as verification
from penstock.verification.reference_copy import with_reference
from scaffolding.models import Case


class Shared:
    """A model, recorded once for each kind of microbatch, and its reference for each number of them.

    Neither knows the schedule or the ranks.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.model if isinstance(case.model, nn.Module) else Chain(case.model)
        self.recordings: dict[Any, list[Any]] = {}
        self.verification: verification.Verification | None = None

    def verify(self, schedule: Schedule) -> penstock.VerificationReport:
        """One verification, from the weights that the model was made with."""
        options = {"ranks": schedule.ranks, "stages_per_rank": schedule.stages // schedule.ranks, "seed": 7}
        options["microbatches"] = schedule.microbatches
        with pytest.MonkeyPatch.context() as patches:
            self._patch(patches)
            if self.verification is None:
                batch = Microbatch(tuple(self.case.args), dict(self.case.kwargs or {}), self.case.target)
                made = with_reference(self.model, self.case.loss)
                self.verification = verification.Verification(*made, batch, options, exact=True)
            self.verification.options = options
            return self.verification.report(schedule)

    def _patch(self, patches: pytest.MonkeyPatch) -> None:
        record = partitioner.record

        def record_once(model: nn.Module, args: Any, kwargs: Any, *units: Any, **sees: Any) -> Any:
            given = flatten((args, kwargs)).leaves
            modes = tuple(module.training for module in model.modules())
            known = self.recordings.setdefault((id(model), modes, *map(describe, given)), [])
            for recording, _ in known:
                if all(guard.holds(given) for guard in recording.guards):
                    return recording
            known.append((record(model, args, kwargs, *units, **sees), model))  # the model is kept for its id
            return known[-1][0]

        patches.setattr(partitioner, "record", record_once)
