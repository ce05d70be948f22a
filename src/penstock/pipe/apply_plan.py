"""Applies a plan: its decisions replace arguments that were not passed."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock._base.errors import ArgumentError, PlanError, warn
from penstock._base.formatting import pluralize
from penstock.costs import first_difference
from penstock.distributed.world import World
from penstock.partition.given_model import as_module
from penstock.partition.measure.pieces import compute_fingerprint
from penstock.plan import Plan, read_plan
from penstock.plan.plan import VARIABLE

DEFAULTS: Mapping[str, Any] = {
    "schedule": "1f1b",
    "stages_per_rank": None,
    "microbatches": None,
    "cuts": None,
    "recompute": "never",
    "offload": False,
}
"""The arguments of `penstock.pipeline` that a plan decides, with their defaults."""


@dataclass(frozen=True, slots=True)
class AppliedPlan:
    """The plan that a pipeline follows; None if there is none. `overridden`: arguments that `penstock run --plan`
    replaces."""

    plan: Plan | None
    overridden: Sequence[str] = ()

    @classmethod
    def of(cls, plan: Plan | str | os.PathLike[str] | None, args: Mapping[str, Any]) -> AppliedPlan:
        """Return the plan to follow: the one passed in, unless `penstock run --plan` names another, which takes
        precedence.

        Args:
            args: the arguments of `penstock.pipeline`.

        Raises:
            ArgumentError: it is no plan, or was given together with an argument that it decides.
        """
        source = (os.environ.get(VARIABLE) or None) if plan is None else plan
        if source is None:
            return cls(None)
        if not isinstance(source, (Plan, str, os.PathLike)):
            raise ArgumentError(
                f"plan={source!r}: expected a penstock.plan.Plan, or the path of one (`penstock plan --out`)"
            )
        loaded = source if isinstance(source, Plan) else read_plan(source)
        conflicts = [name for name, default in DEFAULTS.items() if args[name] is not default and args[name] != default]
        if conflicts and plan is not None:
            raise ArgumentError(f"plan= already decides {', '.join(conflicts)}; pass only one of the two")
        return cls(loaded, conflicts)

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of `penstock.pipeline` that the plan decides."""
        if self.plan is None:
            return {}
        return {
            "schedule": self.plan.schedule,
            "stages_per_rank": self.plan.choice.chunks,
            "microbatches": self.plan.choice.microbatches,
            "cuts": list(self.plan.cuts),
            "recompute": dict.fromkeys(self.plan.recompute, "always") or "never",
            "offload": dict.fromkeys(self.plan.offload, True) or False,
        }

    def ranks(self, requested: int | None) -> int | None:
        """Return how many ranks to ask for."""
        alone = requested is None and int(os.environ.get("WORLD_SIZE", "1")) == 1
        return self.plan.choice.ranks if self.plan is not None and alone else requested

    @property
    def members(self) -> tuple[int, ...]:
        """Which process is each rank, if the plan has no replicas and says so; empty: in order."""
        return self.plan.devices if self.plan is not None and self.plan.choice.replicas == 1 else ()

    def check(self, world: World, model: nn.Module | Sequence[nn.Module], device_type: str) -> None:
        """Check that model, device, dtype and processes are those of the plan.

        Raises:
            PlanError: names the difference.
        """
        if self.plan is None:
            return
        choice = self.plan.choice
        if self.overridden and world.is_first:
            warn(f"{', '.join(self.overridden)}: overridden by the plan {os.environ[VARIABLE]} of penstock run")
        if (made_for := self.plan.made_for) is not None:
            device_type = made_for.device if device_type == "meta" else device_type
            if difference := first_difference(made_for, compute_fingerprint(as_module(model), device_type)):
                raise PlanError(
                    f"plan= is not for this model on this device: {difference}; make a plan of this one with "
                    "`penstock plan`"
                )
            speaks = world.is_first or os.environ.get("LOCAL_RANK") == "0"  # hosts may have different numbers
            if speaks and made_for.threads not in (0, threads := torch.get_num_threads()):
                warn(
                    f"the plan's times are of {pluralize(made_for.threads, 'thread')} per rank, and this one has "
                    f"{threads}: steps will not take what it predicts; profile with --threads {threads} while nothing "
                    "else runs, and plan again"
                )
        if (world.ranks, world.data_parallel) != (choice.ranks, choice.replicas):
            remedy = f"start {choice.ranks} processes, or one that runs all ranks"
            if choice.replicas > 1:
                remedy = f"pass mesh={self.plan.mesh}, and each replica its own rows of the batch"
                if world.ranks * world.data_parallel != choice.devices:
                    remedy = f"start {choice.devices} processes, {remedy}"
            raise PlanError(
                f"the plan is for {choice.replicas} x {choice.ranks} ranks (replicas x pipeline), but there are "
                f"{world.data_parallel} x {world.ranks}: {remedy}"
            )
        arrangement = sorted(map(list, world.lines or (world.members,)))
        if world.is_first and not world.is_local and arrangement != sorted(self.plan.grid):
            warn(
                "the processes are not arranged as in the plan, so that it may be slower than predicted: pass "
                f"mesh={self.plan.mesh}"
            )

    def check_rows(self, world: World, rows: int) -> None:
        """Warn if microbatches are not as large as planned. `rows`: of the example, a replica's batch."""
        if self.plan is None or not world.is_first:
            return
        planned, actual = self.plan.choice.rows, -(-rows // self.plan.choice.microbatches)
        if actual != planned:
            warn(
                f"the plan is for microbatches of {pluralize(planned, 'row')}, and the example's have {actual}: times "
                "and memory will not be as planned; make a plan for this batch with `penstock plan --global-batch-size`"
            )
