"""What every verb of the facade takes, checked: the options of a pipeline besides its processes and the schedule; and a
model and a batch, with the device that they are on. One process has the example batch; the others may give its shapes,
or nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from penstock._base.compat import is_accelerator
from penstock._base.errors import ArgumentError, check_counts, check_flags, is_integer, is_number
from penstock._base.formatting import a
from penstock._base.gradients import check_grad_dtype
from penstock.partition import Balance, BalanceChoice, StageBudget
from penstock.partition.given_model import as_module
from penstock.runtime.batch.batch_dims import BatchDims, Dim, Microbatches, iter_leaves
from penstock.runtime.batch.cut import Cutting, Example, MergeFunction, SplitFunction
from penstock.runtime.batch.outline import Outline
from penstock.runtime.execute.control import Control
from penstock.runtime.execute.transport_choice import TRANSPORTS, TransportChoice
from penstock.runtime.features.compiled import Compile, compile_arguments
from penstock.runtime.features.feature import MakeFeature
from penstock.runtime.features.registry import OffloadChoice, RecomputeChoice, check_not_class
from penstock.runtime.gradients.sharding import parallelized_by
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


# -- the model and the batch -------------------------------------------------------------------------------------------


def default_device(model: nn.Module | Sequence[nn.Module], example: Example) -> torch.device:
    """Return the default device of the run: the accelerator that holds the model or else the example."""
    device = next((p.device for p in as_module(model).parameters()), torch.device("cpu"))
    if is_accelerator(device):
        return device
    return next((t.device for t in batch_tensors(example) if is_accelerator(t.device)), device)


def has_values(example: Example) -> bool:
    """Whether a process has the example itself, rather than its shapes (tensors on the meta device) or nothing."""
    tensors = batch_tensors(example)
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def batch_tensors(example: Example) -> list[Tensor]:
    """Return the tensors of a batch, those in `Microbatches` included."""
    return [leaf for _, leaf in iter_leaves(example) if isinstance(leaf, Tensor)]


def share_example(control: Control, example: Example) -> Example:
    """Return the example, from the first process that has one if this one has none. Every process calls it.

    Raises:
        ArgumentError: no process has one.
    """
    present = control.gather(has_values(example), "its example")
    if all(present):
        return example
    if not any(present):
        if batch_tensors(example):
            raise ArgumentError(
                "the example is on the meta device on every rank that gives one: at least the rank of the first stage "
                "has to give real tensors, since the forward may branch on the values of integers"
            )
        return example  # it has no tensors: a function of the user's makes them
    first = present.index(True)
    outlines = control.gather(Outline.of_example(example) if control.world.number == first else None, "its example")
    if has_values(example):
        return example
    filled: list[Example] = outlines[first].fill()
    return filled[0]


def check_not_parallelized(model: nn.Module) -> None:
    """Raise ArgumentError if the model, or one of its layers, was parallelized before."""
    if by := parallelized_by(model, "torch.distributed.fsdp", "torch.distributed._composable"):
        raise ArgumentError(
            f"model: fully_shard or replicate was applied before the pipeline was made ({by}); pass the plain model, "
            "and shard its stages with parallelize=lambda stage: fully_shard(stage, mesh=mesh['dp']); replicas need "
            "neither, as the pipeline averages gradients over mesh['dp']"
        )


def validate_inputs(args: Any, kwargs: Any) -> Example:
    """Return one batch, from the user's arguments.

    Raises:
        ArgumentError: they are not a sequence and a mapping, or a name is one that `Pipeline.step` takes itself.
    """
    if isinstance(args, (Tensor, Microbatches)):
        kind = "a tensor" if isinstance(args, Tensor) else "a Microbatches"
        raise ArgumentError(f"args is {kind}; expected a tuple of the model's positional inputs: pass (x,)")
    if isinstance(args, (Mapping, str)) or not isinstance(args, Iterable):
        raise ArgumentError(
            f"args is {a(type(args).__name__)}; expected a tuple of the model's positional inputs, such as (x,); what "
            "it takes by keyword is given as kwargs={'x': x}"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ArgumentError(
            f"kwargs is {a(type(kwargs).__name__)}; expected the model's inputs by keyword, {{'x': x}}; what the loss "
            "takes is given as target=..., the loss as loss_fn=..."
        )
    reserved = sorted({"target", "outputs", "timeline", "loss_scale"} & (kwargs or {}).keys())
    if reserved:
        raise ArgumentError(
            f"kwargs: the model's argument {reserved[0]!r} has the name of one that Pipeline.step takes itself; "
            "pass it by position in args, or wrap the model in a module that names it otherwise"
        )
    return tuple(args), dict(kwargs or {})
