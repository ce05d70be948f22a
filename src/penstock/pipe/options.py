"""The options of a pipeline besides the model, its processes and the schedule."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError, check_counts, check_flags, is_integer, is_number
from penstock._base.gradients import check_grad_dtype
from penstock.partition import Balance, BalanceChoice, StageBudget
from penstock.runtime.batch.batch_dims import BatchDims, Dim
from penstock.runtime.batch.cut import Cutting, MergeFunction, SplitFunction
from penstock.runtime.execute.transport_choice import TRANSPORTS, TransportChoice
from penstock.runtime.features.compiled import Compile, compile_arguments
from penstock.runtime.features.feature import MakeFeature
from penstock.runtime.features.registry import OffloadChoice, RecomputeChoice, check_not_class
from penstock.runtime.loss.functions import Loss, checked_loss, reduction_advice
from penstock.runtime.loss.loss import Reduction
from penstock.runtime.model.ownership import Materialize
from penstock.schedule import Schedule, in_flight_by_stage
from penstock.simulate import LinkCost
from penstock.trace.runs.option import RunConfig

if TYPE_CHECKING:
    from penstock.runtime.features.frame import Parallelize


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of `penstock.pipeline` by the same names, checked.

    Attributes:
        loss: `loss_fn` as a function of output and target.
        choice: the parsed `balance`.
        cutting: how batches are cut and merged, by batch_dims, split_fn and merge_fn.
        recorded: the parsed `run_dir`.

    Raises:
        ArgumentError: one of them is invalid, or two of them exclude each other.
    """

    loss_fn: Loss | Callable[[Any], Tensor] | None = None
    reduction: Reduction = "mean"
    batch_dims: BatchDims | Dim = None
    split_fn: SplitFunction | None = None
    merge_fn: MergeFunction | None = None
    cuts: Sequence[str] | None = None
    leaf_modules: Sequence[str] | None = None
    split_inside: Sequence[str] | None = None
    balance: Balance = "time"
    memory_limit: float | None = None
    link_cost: LinkCost | None = None
    devices: Sequence[torch.device | str] | torch.device | str | None = None
    broadcast_loss: bool = True
    transport: TransportChoice = "auto"
    materialize: Materialize | None = None
    parallelize: Parallelize | None = None
    unshard_window: int | None = None
    seed: int | None = None
    recompute: RecomputeChoice = "never"
    offload: OffloadChoice = False
    deferred_batch_norm: bool = False
    compile: Compile = False
    check_finite: bool = False
    features: Sequence[MakeFeature] = ()
    grad_dtype: torch.dtype | None = None
    heartbeat_timeout: float | None = None
    pg_timeout: float | None = None
    pg_options: Any = None
    run_dir: RunConfig | str | os.PathLike[str] | None = None
    choice: BalanceChoice = field(init=False)
    loss: Loss | None = field(init=False)
    cutting: Cutting = field(init=False)
    recorded: RunConfig | None = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "choice", BalanceChoice.of(self.balance))
        object.__setattr__(self, "loss", checked_loss(self.loss_fn))
        object.__setattr__(self, "cutting", Cutting.of(self.batch_dims, self.split_fn, self.merge_fn))
        object.__setattr__(self, "recorded", RunConfig.of(self.run_dir))
        self._check_types()
        self._check_combinations()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Options:
        """Build options from those `arguments` that are options, by name; the others have their defaults."""
        return cls(**{f.name: arguments[f.name] for f in fields(cls) if f.init and f.name in arguments})

    def decide(self, name: str, value: Any) -> None:
        """Replace an option by what an example has shown that it has to be."""
        object.__setattr__(self, name, value)

    @property
    def loss_notes(self) -> tuple[str, ...]:
        """Advice on `reduction`, if it does not fit a loss of torch's."""
        note = reduction_advice(self.loss, self.reduction)
        return () if note is None else (note,)

    def stage_budget(self, order: Schedule) -> StageBudget:
        """Return the budget of each rank for its stages under this schedule, memory only if that matters for the
        cuts."""
        if self.memory_limit is None and not self.choice.memory:
            return StageBudget(link=self.link_cost)
        limit = math.inf if self.memory_limit is None else self.memory_limit
        max_stages = max(len(order.placement.stages_on(rank)) for rank in range(order.ranks))
        microbatches = len(order.placement.microbatches_of(0, order.microbatches))
        return StageBudget(limit, tuple(in_flight_by_stage(order)), max_stages, self.link_cost, microbatches)

    def _check_types(self) -> None:
        check_grad_dtype(self.grad_dtype)
        if not callable(self.reduction) and self.reduction not in ("mean", "sum"):
            raise ArgumentError(f"reduction={self.reduction!r}: expected 'mean', 'sum' or a function of the target")
        for name, value in {
            "cuts": self.cuts,
            "leaf_modules": self.leaf_modules,
            "split_inside": self.split_inside,
        }.items():
            if isinstance(value, str):
                raise ArgumentError(f"{name}={value!r}: expected a list of names, such as [{value!r}]")
            if value is not None and not (isinstance(value, Collection) and all(isinstance(n, str) for n in value)):
                raise ArgumentError(f"{name}={value!r}: expected a list of names of modules, or None")
        if not callable(self.transport) and self.transport not in tuple(TRANSPORTS):
            raise ArgumentError(
                f"transport={self.transport!r}: expected one of {', '.join(map(repr, TRANSPORTS))}, or a function of a "
                "penstock.runtime.transport.Endpoint that makes a transport"
            )
        if not isinstance(self.features, Sequence) or not all(map(callable, self.features)):
            raise ArgumentError(
                f"features={self.features}: expected a list of functions that make a feature for a stage, such as "
                "[Counts.of]"
            )
        for feature in self.features:
            check_not_class("features", feature)
        check_flags(**{name: getattr(self, name) for name in ("broadcast_loss", "deferred_batch_norm", "check_finite")})
        for name in ("materialize", "parallelize"):
            if not (getattr(self, name) is None or callable(getattr(self, name))):
                raise ArgumentError(f"{name}={getattr(self, name)!r}: expected a function, or None")
        if not (self.seed is None or is_integer(self.seed)):
            raise ArgumentError(f"seed={self.seed!r}: expected an integer, or None")
        check_counts(required=False, unshard_window=self.unshard_window)
        for name in ("heartbeat_timeout", "pg_timeout"):
            wait = getattr(self, name)
            if not (wait is None or (is_number(wait) and 1 <= wait < math.inf)):
                raise ArgumentError(f"{name}={wait!r}: expected seconds >= 1, or None")
        limit = self.memory_limit
        if not (limit is None or (is_number(limit) and limit > 0)):
            raise ArgumentError(f"memory_limit={limit!r}: expected a number of bytes above 0, or None")
        if not (self.link_cost is None or isinstance(self.link_cost, LinkCost)):
            raise ArgumentError(
                f"link_cost={self.link_cost!r}: expected a "
                "penstock.simulate.LinkCost(latency_seconds, bytes_per_second), or None"
            )

    def _check_combinations(self) -> None:
        if self.memory_limit is not None and self.cuts is not None:
            raise ArgumentError(
                f"memory_limit={self.memory_limit}: it is for cuts that are found, but cuts= says where they are; pass "
                "one of them"
            )
        by_time = self.cuts is None and (self.choice.measures or self.choice.profile is not None)
        if self.link_cost is not None and not by_time:
            reason = f"balance={self.balance!r} asks for others" if self.cuts is None else "cuts= says where they are"
            raise ArgumentError(
                f"link_cost={self.link_cost}: it is for cuts by time, but {reason}; leave one of them out"
            )
        compile_arguments(self.compile)
        if self.unshard_window is not None and self.parallelize is None:
            raise ArgumentError(
                f"unshard_window={self.unshard_window}: it is for stages that parallelize= applies fully_shard to; "
                "pass parallelize= too, or leave it out"
            )
