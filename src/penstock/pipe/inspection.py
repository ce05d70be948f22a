"""What a split of a model would look like: its stages, what crosses between them, what they share.

The split is made as `penstock.pipeline` makes it, so problems show without a step. Nothing runs but the loss, once, on
a made-up output, and what is measured for `balance="time"`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.aliases import PIPELINE_ALIASES, accept_aliases, accept_old_names
from penstock._base.errors import ArgumentError, PenstockError, check_counts
from penstock._base.formatting import pluralize
from penstock._base.gradients import check_grad_dtype, gradient_bytes
from penstock._base.memory import meta_bytes
from penstock._base.pytree import leaf_tensors
from penstock._base.stages import MODEL_INPUT, gradient_routes, ties
from penstock.distributed.world import World
from penstock.partition import Balance, Partition
from penstock.partition.given_model import as_module
from penstock.partition.measure.footprint import Footprint, footprint
from penstock.pipe.build import build
from penstock.pipe.options import Options, validate_inputs
from penstock.pipe.pipeline import Pipeline
from penstock.pipe.run_info import RankMemory, module_names, predict_rank_memory
from penstock.pipe.verified import UNVERIFIED
from penstock.runtime.batch.batch_dims import BatchDims, Dim
from penstock.runtime.batch.cut import Batch, Cutting, Example, MergeFunction, SplitFunction
from penstock.runtime.batch.example import default_count
from penstock.runtime.features.registry import OffloadChoice, RecomputeChoice
from penstock.runtime.loss.functions import Loss
from penstock.runtime.loss.loss import Reduction
from penstock.runtime.model.ownership import check_no_overlaps
from penstock.schedule import Schedule, schedule_spec
from penstock.schedule.lowering import resolve_order
from penstock.simulate import LinkCost


@accept_old_names(
    begins="first_module",
    work_share="work_fraction",
    parameter_share="parameter_fraction",
    trained="trainable_parameters",
    updated="mutated_buffers",
    draws="random_modules",
)
@dataclass(frozen=True, slots=True)
class StageInfo:
    """One stage.

    Attributes:
        index: its number.
        first_module: the name of the module that it begins with; empty for stage 0.
        work_fraction: its fraction of the model's work (floating-point operations and bytes moved, forward and
            backward).
        parameters: the number of elements in its parameters, tied ones included.
        parameter_fraction: its fraction of the model's parameters; a tied one counts on the first of its stages.
        parameter_bytes: their size.
        trainable_parameters: how many of them require a gradient.
        gradient_bytes: the size of these gradients, in the dtype in which they accumulate.
        buffers: the names of the buffers that it holds.
        mutated_buffers: the buffers that the forward updates.
        random_modules: the names of the modules on it that draw random numbers.
        inputs: the names of the model's inputs that it uses.
        modules: the names of the modules that run on it, none within another.
        activation_bytes: what a microbatch keeps on it from its forward to its backward, besides parameters and
            buffers; None if it does not run on fake tensors.
        seconds: its forward and backward of a microbatch, as they were measured or the profile says where the model is
            cut by that; None if it is not.
    """

    index: int
    first_module: str
    work_fraction: float
    parameters: int
    parameter_fraction: float
    parameter_bytes: int
    trainable_parameters: int
    gradient_bytes: int
    buffers: tuple[str, ...]
    mutated_buffers: tuple[str, ...]
    random_modules: tuple[str, ...]
    inputs: tuple[str, ...]
    modules: tuple[str, ...]
    activation_bytes: int | None
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class StageTransfer:
    """A tensor that goes from one stage to another.

    Attributes:
        source, target: the stages. If target - source > 1, it skips those in between.
        value: its name in the recording.
        module: the module that made it; empty for the model itself, and for an input of the model.
        source_line: `file:line` in the code; empty for an input, and for what a whole module returned.
        shape, dtype, bytes: for the first microbatch.
        requires_grad: whether a gradient comes back.
    """

    source: int
    target: int
    value: str
    module: str
    source_line: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    requires_grad: bool


@dataclass(frozen=True, slots=True)
class TiedParameter:
    """A parameter that several stages hold: one replica each, with their gradients added up."""

    name: str
    stages: tuple[int, ...]
    parameters: int


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found.

    Attributes:
        model: the class of the model.
        parameters, parameter_bytes: those of the unsplit model, each parameter once.
        microbatches: how many the batch is cut into; bytes and shapes are those of the first.
        stages, crossings, ties: see there.
        branches: `file:line` of each place where the forward reads the values of an input, and what it read. The split
            holds for batches that read the same.
        notes: what the user should know about the recording.
        memory: what each rank needs in a training step; empty if that cannot be seen: a stage does not run on fake
            tensors, forwards are recomputed in part or with a split backward, or activations are offloaded. What the
            loss keeps is left out.
    """

    model: str
    parameters: int
    parameter_bytes: int
    microbatches: int
    stages: tuple[StageInfo, ...]
    crossings: tuple[StageTransfer, ...]
    ties: tuple[TiedParameter, ...]
    branches: tuple[str, ...]
    notes: tuple[str, ...]
    memory: tuple[RankMemory, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@accept_aliases(**PIPELINE_ALIASES)
def inspect(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    target: Any = None,
    stages: int = 2,
    stages_per_rank: int | None = None,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    loss_fn: Loss | Callable[[Any], Tensor] | EllipsisType | None = ...,
    reduction: Reduction = "mean",
    batch_dims: BatchDims | Dim = None,
    split_fn: SplitFunction | None = None,
    merge_fn: MergeFunction | None = None,
    cuts: Sequence[str] | None = None,
    leaf_modules: Sequence[str] | None = None,
    split_inside: Sequence[str] | None = None,
    balance: Balance = "time",
    memory_limit: float | None = None,
    link_cost: LinkCost | None = None,
    recompute: RecomputeChoice = "never",
    offload: OffloadChoice = False,
    deferred_batch_norm: bool = False,
    grad_dtype: torch.dtype | None = None,
) -> Inspection:
    """Record a model's forward for one batch and cut it as `penstock.pipeline` would. Raise what that and its first
    step would raise, except what depends on values. A model on the meta device stays there.

    Args:
        model, args, kwargs: a module, or a list of layers, and its inputs.
        stages: how many; the number of ranks is this divided by the chunks that the schedule puts on each.
        stages_per_rank, schedule: those of the planned run.
        microbatches: how many the batch is cut into. All are recorded, so that one that cannot run is refused; the
            report is about the first. None: the `Schedule`'s; as many as the batch is already cut into; or otherwise 8,
            or as many as it has rows, if fewer.
        target, loss_fn: as for `penstock.pipeline` and `Pipeline.step`. The loss is called once, with a made-up output.
            Left out: nothing is said about the loss.
        reduction, batch_dims, split_fn, merge_fn, cuts, leaf_modules, split_inside, balance: as for
            `penstock.pipeline`.
        memory_limit, link_cost, recompute, offload, deferred_batch_norm: as for `penstock.pipeline`.
        grad_dtype: as for `penstock.pipeline`; the parameters' own `grad_dtype` stays as it is.

    Raises:
        ArgumentError: an argument is wrong, or two do not go together.
        ShapeError: the batch cannot be cut that way.
        PartitionError: the model cannot be recorded or cut; the text names the module, the line and the remedy.
        ScheduleError: the schedule is not legal.
    """
    arguments = locals()  # the arguments by name: most are fields of Options
    example = validate_inputs(args, kwargs)
    order = _order(schedule, stages, stages_per_rank, microbatches, example, Cutting.of(batch_dims, split_fn, merge_fn))
    dtype = check_grad_dtype(grad_dtype)
    on_meta = any(parameter.is_meta for parameter in as_module(model).parameters())
    devices = ["meta"] * order.ranks if on_meta else None
    # Nothing accumulates here: `gradient_dtype` is only counted with.
    replaced = {"loss_fn": None if loss_fn is ... else loss_fn, "devices": devices, "grad_dtype": None}
    options = Options.of({**arguments, **replaced})
    with torch.enable_grad(), build(model, example, World(order.ranks), order, options) as pipe:
        loss_note = pipe.session.steps.dry_run(Batch(*example, target), loss=loss_fn is not ...)
        recorded = pipe.session.partition
        assert isinstance(recorded, Partition)  # `build` was given no other front end
        partition = replace(recorded, stages=recorded.stages[: order.placement.depth])  # one copy of the model
        notes = [note for note in (loss_note, _process_note(partition, order)) if note is not None]
        footprints = [footprint(stage.module, [i.meta for i in stage.meta.inputs]) for stage in partition.stages]
        inspection = _build_inspection(model, pipe, partition, pipe.schedule.microbatches, dtype, footprints)
        ranks: tuple[RankMemory, ...] = ()
        if recompute in ("never", "always") and not offload:
            targets = sum(tensor.nbytes for tensor in leaf_tensors(target))
            ranks = predict_rank_memory(
                partition,
                footprints,
                order,
                dtype,
                targets,
                with_loss=loss_fn is not ...,
                recomputes=recompute == "always",
            )
        return replace(inspection, notes=(*inspection.notes, *notes), memory=ranks)


def _order(
    schedule: str | Schedule,
    stages: int,
    chunks: int | None,
    microbatches: int | None,
    example: Example,
    cutting: Cutting,
) -> Schedule:
    """Return the schedule of the run, for the number of ranks that have this many stages."""
    check_counts(required=False, stages=stages, microbatches=microbatches, stages_per_rank=chunks)
    if isinstance(schedule, Schedule):
        if schedule.placement.depth != stages:
            raise ArgumentError(
                f"stages={stages}, but schedule {schedule.name!r} has {schedule.placement.depth}; "
                f"pass stages={schedule.placement.depth}"
            )
        return resolve_order(schedule, schedule.ranks, microbatches, chunks)
    per_rank = schedule_spec(schedule).chunks if chunks is None else chunks
    ranks, remainder = divmod(stages, max(per_rank, 1))
    if remainder:
        raise ArgumentError(
            f"stages={stages}: schedule {schedule!r} puts {per_rank} on each rank; pass a multiple of {per_rank}, or "
            "another stages_per_rank="
        )
    return resolve_order(schedule, ranks, microbatches or default_count(cutting, example), chunks)


def _process_note(partition: Partition, order: Schedule) -> str | None:
    """Return what one process can do, but one process per rank cannot."""
    try:
        check_no_overlaps(partition.stages, lambda stage: order.placement.rank_of[stage])
    except PenstockError as error:
        return f"with a process for each rank this is refused: {error}"
    return None


def _build_inspection(
    model: nn.Module | Sequence[nn.Module],
    pipe: Pipeline,
    partition: Partition,
    microbatches: int,
    dtype: torch.dtype | None,
    footprints: Sequence[Footprint | None],
) -> Inspection:
    model_parameters = list(pipe.model.parameters())
    parameters = sum(p.numel() for p in model_parameters)
    return Inspection(
        model=type(model).__name__ if isinstance(model, nn.Module) else pluralize(len(model), "layer"),
        parameters=parameters,
        parameter_bytes=sum(p.numel() * p.element_size() for p in model_parameters),
        microbatches=microbatches,
        stages=tuple(_stage_info(partition, index, parameters, dtype, f) for index, f in enumerate(footprints)),
        crossings=_stage_transfers(partition),
        ties=_tied_parameters(partition),
        branches=tuple(f"{g.source_line} reads {g.expected!r}" for g in partition.guards if g.expected is not None),
        notes=tuple(note for note in pipe.notes if note != UNVERIFIED),
    )


def _stage_info(
    partition: Partition, index: int, parameters: int, dtype: torch.dtype | None, footprint: Footprint | None
) -> StageInfo:
    stage = partition.stages[index]
    stage_parameters = list(stage.parameters.values())
    earlier = {name for lower in partition.stages[:index] for name in lower.parameters}
    new_parameters = sum(p.numel() for name, p in stage.parameters.items() if name not in earlier)
    module_ids = {id(module) for module in stage.module.modules()}
    return StageInfo(
        index=index,
        first_module=partition.cuts[index - 1] if index else "",
        work_fraction=partition.work[index] / (sum(partition.work) or 1),
        parameters=sum(p.numel() for p in stage_parameters),
        parameter_fraction=new_parameters / (parameters or 1),
        parameter_bytes=sum(p.numel() * p.element_size() for p in stage_parameters),
        trainable_parameters=sum(p.numel() for p in stage_parameters if p.requires_grad),
        gradient_bytes=gradient_bytes([p for p in stage_parameters if p.requires_grad], dtype),
        buffers=stage.meta.buffers,
        mutated_buffers=stage.meta.updated,
        random_modules=tuple(
            name
            for name, module in partition.drawing_modules.items()
            if id(module) in module_ids and name not in partition.may_draw
        ),
        inputs=tuple(value.name for value in stage.meta.inputs if value.source == MODEL_INPUT),
        modules=module_names(stage),
        activation_bytes=None if footprint is None else footprint.kept,
        seconds=partition.costs[index].forward_seconds + partition.costs[index].backward_seconds
        if partition.costs
        else None,
    )


def _stage_transfers(partition: Partition) -> tuple[StageTransfer, ...]:
    metas = [stage.meta for stage in partition.stages]
    routes = gradient_routes(metas)
    transfers = []
    for stage in metas:
        for value in stage.inputs:
            if value.source == MODEL_INPUT:
                continue
            origin = partition.origins[value.name]
            transfers.append(
                StageTransfer(
                    source=value.source,
                    target=stage.index,
                    value=value.name,
                    module=origin.module,
                    source_line=origin.source_line,
                    shape=value.meta.shape,
                    dtype=value.meta.dtype,
                    bytes=meta_bytes(value.meta),
                    requires_grad=(value.source, value.name) in routes,
                )
            )
    return tuple(sorted(transfers, key=lambda crossing: (crossing.source, crossing.target)))


def _tied_parameters(partition: Partition) -> tuple[TiedParameter, ...]:
    shared = ties([stage.meta for stage in partition.stages])
    return tuple(
        TiedParameter(name, holders, partition.stages[holders[0]].parameters[name].numel())
        for name, holders in shared.items()
    )
