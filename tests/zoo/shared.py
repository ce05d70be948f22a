"""Verification of one model under many schedules: what its runs have in common is made once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

import penstock
from penstock.partition import partitioner
from penstock.partition.stages.partition import describe
from penstock.partition.units.chain import Chain
from penstock.proof import verify as verification
from penstock.schedule import Schedule
from penstock.trees import flatten
from scaffolding.models import Case


class Shared:
    """A model, recorded once for each kind of microbatch, and its reference for each number of them.

    Neither knows the schedule or the ranks.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.model = case.model if isinstance(case.model, nn.Module) else Chain(case.model)
        self.before = copy.deepcopy(self.model.state_dict())
        self.recordings: dict[Any, list[Any]] = {}
        self.references: dict[Any, Any] = {}

    def verify(self, schedule: Schedule) -> penstock.Report:
        """One verification, from the weights that the model was made with."""
        with pytest.MonkeyPatch.context() as patches:
            self._patch(patches)
            self.model.load_state_dict(self.before)
            self.model.zero_grad(set_to_none=True)
            return penstock.verify(
                self.model,
                self.case.args,
                target=self.case.target,
                loss_fn=self.case.loss,
                kwargs=self.case.kwargs,
                ranks=schedule.ranks,
                chunks=schedule.stages // schedule.ranks,
                microbatches=schedule.microbatches,
                schedule=schedule,
                seed=7,
                exact=True,
            )

    def _patch(self, patches: pytest.MonkeyPatch) -> None:
        record, reference = partitioner.record, verification.reference

        def record_once(model: nn.Module, args: Any, kwargs: Any, *units: Any, **sees: Any) -> Any:
            given = flatten((args, kwargs)).leaves
            known = self.recordings.setdefault((id(model), *map(describe, given)), [])
            for recording, _ in known:
                if all(guard.holds(given) for guard in recording.guards):
                    return recording
            known.append((record(model, args, kwargs, *units, **sees), model))  # the model is kept for its id
            return known[-1][0]

        def reference_once(model: Any, pipe: penstock.Pipeline, *rest: Any) -> Any:
            m = pipe.schedule.microbatches
            if m not in self.references:
                self.references[m] = reference(model, pipe, *rest)
            return self.references[m]

        patches.setattr(partitioner, "record", record_once)
        patches.setattr(verification, "reference", reference_once)
