"""The facade: `pipeline(model, ...)` splits a model over ranks and trains it with `step`.

The same script runs alone (one process drives all ranks) and under torchrun (each process is one rank).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from penstock._base.aliases import PIPELINE_ALIASES, accept_aliases
from penstock._base.errors import ArgumentError, PartitionError, check_counts, warn
from penstock._base.formatting import pluralize
from penstock._base.lazy import load_provider
from penstock.distributed.failure import OUTSIDE, Position
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.groups import GROUP_SECONDS, GroupOptions
from penstock.distributed.launch.processes import VERIFY
from penstock.distributed.world import World, join, parse_device, resolve_device
from penstock.partition import Balance, Partitioner, TooFewLayersError
from penstock.partition.given_model import as_module
from penstock.pipe.apply_plan import AppliedPlan
from penstock.pipe.options import (
    Options,
    check_not_parallelized,
    default_device,
    has_values,
    share_example,
    validate_inputs,
)
from penstock.pipe.pipeline import Pipeline
from penstock.pipe.run_info import record
from penstock.pipe.session import Session
from penstock.runtime.batch.batch_dims import BatchDims, Dim
from penstock.runtime.batch.cut import CutBatch, Example, MergeFunction, SplitFunction
from penstock.runtime.batch.example import cut_like
from penstock.runtime.batch.outline import Outline, SingleRowError
from penstock.runtime.execute.engine import Engine
from penstock.runtime.execute.transport_choice import TransportChoice
from penstock.runtime.features.compiled import Compile
from penstock.runtime.features.feature import MakeFeature
from penstock.runtime.features.registry import OffloadChoice, RecomputeChoice
from penstock.runtime.front_end import FrontEnd, MakeFrontEnd
from penstock.runtime.gradients.dtensors import accumulate_in
from penstock.runtime.loss.functions import Loss
from penstock.runtime.loss.loss import Reduction, check_sums
from penstock.runtime.model.ownership import HeldElsewhereError, Materialize
from penstock.runtime.model.split_model import SplitModel
from penstock.runtime.step.step import one_at_a_time
from penstock.schedule import MICROBATCHES_HINT, Schedule
from penstock.schedule.lowering import resolve_order
from penstock.simulate import LinkCost
from penstock.trace.runs.option import RunConfig

if TYPE_CHECKING:
    from penstock.plan import Plan
    from penstock.runtime.features.frame import Parallelize


@accept_aliases(**PIPELINE_ALIASES)
def pipeline(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    ranks: int | None = None,
    stages_per_rank: int | None = None,
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    loss_fn: Loss | Callable[[Any], Tensor] | None = None,
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
    mesh: DeviceMesh | None = None,
    devices: Sequence[torch.device | str] | torch.device | str | None = None,
    broadcast_loss: bool = True,
    transport: TransportChoice = "auto",
    materialize: Materialize | None = None,
    parallelize: Parallelize | None = None,
    unshard_window: int | None = None,
    seed: int | None = None,
    recompute: RecomputeChoice = "never",
    offload: OffloadChoice = False,
    deferred_batch_norm: bool = False,
    compile: Compile = False,
    check_finite: bool = False,
    features: Sequence[MakeFeature] = (),
    grad_dtype: torch.dtype | None = None,
    heartbeat_timeout: float | None = None,
    pg_timeout: float | None = None,
    pg_options: Any = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    run_dir: RunConfig | str | os.PathLike[str] | None = None,
    verify: bool | None = None,
) -> Pipeline:
    """Split a model into stages and prepare them for training.

    Under torchrun every process makes the same call, with the same model built from the same seed. Each keeps only its
    own stages: the other parameters of `model` are moved to the meta device, so that their memory is free.

    Args:
        model: any module; or a list of layers, or a list with one module per stage.
        args: one batch, as the model's positional inputs: tensors with the batch in their first dimension, or
            `Microbatches`. Shapes are read from it, and values only where the forward branches on those of integers.
            Ranks that do not run the first stage may pass tensors on the meta device, or no example at all. Later
            batches may have other shapes.
        kwargs: the same by keyword.
        ranks: the number of ranks; None: the world size under torchrun, one otherwise.
        stages_per_rank: stages per rank; `ranks * stages_per_rank` stages in all. None: the `Schedule`'s, or 1.
        schedule: a name from `penstock.schedule.names()`, or a `Schedule`.
        microbatches: into how many pieces each batch is cut (fewer for fewer rows). None: the `Schedule`'s, or 8.
        loss_fn: `loss_fn(output, target)`, a scalar, or `loss_fn(output)`; None if the model computes its own:
            `output.loss`, `output["loss"]`, a scalar, or the one scalar of a tuple or list that requires a gradient.
            Also `loss`.
        reduction: how the loss reduces a batch: "mean", "sum", or a function of the target that gives a microbatch's
            weight in the mean (for masked targets: the number of tokens that count). The function gets the target on
            the device where you gave it.
        batch_dims: if the batch is not in the first dimension of a tensor: one dimension for all, or a dict of any of
            "args", "kwargs", "target" and "output", each a dimension or a structure of dimensions that mirrors (the
            beginning of) that value. None gives each microbatch the whole tensor. An output may also be "mean" or
            "sum". `TensorChunkSpec` and `_Replicate` of `torch.distributed.pipelining` work, too.
        split_fn: `split(args, kwargs, target, microbatches)` returns a list of `penstock.Microbatch`, for batches that
            no dimension describes: graphs, packed sequences, lists of images of different sizes.
        merge_fn: `merge(outputs)` makes the whole batch's output from a list of the microbatches', for `predict`.
        cuts: the name of each module that begins a new stage; None: at marks (`penstock.cut()`), or balanced.
            "layer:2" is a second call, "relu#3" a line: see docs/guides/cuts.md.
        leaf_modules: modules to take as one piece, besides those found automatically.
        split_inside: modules to take apart, so that cuts can fall inside, besides those found automatically.
        balance: what automatic cuts even out: "time", measured by running each unit of the model, on the first process,
            for up to half a second (a model of little work is cut by "flops"); "flops" (the work of forward and
            backward, by its operations and bytes, the same in every run), "parameters" or "layers"; a
            `penstock.Profile`, or the path of one (.json); "type:" and a pattern of names of classes before which
            stages may begin; or `balance(name, module)`, what a module costs.
        memory_limit: the bytes that a rank may need: for parameters, gradients and an optimizer with two values for
            each trained one, for the activations of as many microbatches as the schedule keeps in flight there (as if
            nothing were recomputed or offloaded), for the batch's inputs, a loss like cross entropy, and what a unit
            takes while it runs. Cuts that need more are left out.
        link_cost: a `penstock.simulate.LinkCost`: what a message between two ranks costs, which counts with the time of
            both stages. None: like shared memory on CPUs, and PCIe between other devices.
        mesh: the processes to use, by dimensions: "pp" for the pipeline; "dp" (or "dp_replicate", "dp_shard", "fsdp")
            for replicas that train on other data; "tp" for layers that `parallelize` divides. None: all, one pipeline.
        devices: where to compute: one device, a type such as "cuda" (each rank takes its own), or one per rank. None:
            where the model is, or the example if that is on an accelerator. The model moves there before it is
            recorded, and an example on the CPU is recorded as if it were there.
        transport: what carries values between processes: "auto" uses shared memory between CPU ranks of one machine
            and `torch.distributed` otherwise; "distributed" always uses the latter. "staged" goes through the host's
            memory, for several ranks on one device, or devices that cannot reach each other; it is taken by itself if
            the default process group has no NCCL for the device. Or a function that makes your own; see
            `penstock.runtime.transport.Endpoint`.
        broadcast_loss: give the loss to every rank, not only the last stage's.
        materialize: `materialize(name, module)` sets the values of a module built on the meta device;
            None: its `reset_parameters()`.
        parallelize: called with each of this process's stages, a module that holds the model's own modules under their
            names, to shard it in place: `fully_shard` over `mesh["dp"]`, `parallelize_module` over `mesh["tp"]`.
        unshard_window: how many of a rank's stages that `fully_shard` was applied to are gathered at once: each is
            gathered one action before it is needed, and freed when another takes its place. None: all, each from its
            first action to its last.
        seed: of the random streams (dropout); None: torch's initial seed on rank 0.
        recompute: which forwards run again in backward, so that their activations need not be kept: "never",
            "except_last" (all but each stage's last microbatch), "always", an integer n (every n-th layer), or a
            function that makes a kind of your own; see `penstock.runtime.features.feature.Recompute`. One for all
            stages, a list with one for each, or a dict by stage.
        offload: keep activations in the host's memory between forward and backward, if they are away for long enough
            to make room; also by stage.
        deferred_batch_norm: batch norms update their running statistics once per step, from the whole batch.
        compile: run each stage through `torch.compile`: True, or a dict of its arguments.
        check_finite: raise NonFiniteError in the step that makes a NaN or Inf. For debugging: every call is checked.
        features: what stages do besides, in your own code: functions that make a
            `penstock.runtime.features.feature.Feature` for a stage, or None; see docs/extending.md. They come after
            Penstock's own, the outermost first. Each stays within its process, so ranks may have different ones.
        grad_dtype: torch.float32 or torch.float64: gradients of parameters in lower precision accumulate, and are
            summed over ranks, in that dtype, and so is their `.grad`: sets `Tensor.grad_dtype`, which stays after
            `close`. None: in the parameter's own dtype, or whatever you set there.
        heartbeat_timeout: seconds of silence after which a rank that another waits for counts as lost, and the run
            ends; pass more than the longest time that the network may be silent. None: 60 for a rank on another
            machine. On the same machine its process is checked after 5 seconds, and the rank is lost if the process is
            stopped.
        pg_timeout: seconds that an operation of the process groups may take: the last resort, for example if a
            device hangs. None: an hour. Give more than the longest time that a first step takes to compile.
        pg_options: a `torch.distributed.ProcessGroupNCCL.Options` for the process groups that exchange tensors, as for
            `torch.distributed.new_group`. Each group gets a copy, with `pg_timeout`.
        plan: what `penstock plan` wrote, or `penstock.plan.make_plans` found: decides schedule, stages_per_rank,
            microbatches, cuts, recompute and offload, and, in one process, ranks. A plan with replicas needs a `mesh`
            as well: `DeviceMesh(type, plan.grid, mesh_dim_names=("dp", "pp"))`.
        run_dir: a folder, such as "runs/gpt", in which to record the run: each step's loss and time, some timelines,
            memory, and the current state of each rank; see `penstock.trace.runs`. Or a `RunConfig` of there, which also
            says how often, and how many steps there will be.
        verify: verify the first step before it is taken, unless this model, schedule and options have passed
            `penstock.verify`: it raises VerificationError if a value differs from the unsplit model's. Each process
            keeps a copy of the whole model until then. None: as `penstock run --verify` says.

    Raises:
        ArgumentError: an argument is wrong; the text names it and says what to do.
        PartitionError: the model cannot be recorded or cut as asked.
        ScheduleError: the schedule is not legal, or could deadlock.
    """
    arguments = {**locals()}  # the arguments by name: most are fields of Options
    applied_plan = AppliedPlan.of(plan, arguments)
    arguments |= applied_plan.arguments
    check_counts(required=False, microbatches=arguments["microbatches"], stages_per_rank=arguments["stages_per_rank"])
    model = as_module(model)
    check_not_parallelized(model)
    example = validate_inputs(args, kwargs)
    options = Options.of(arguments)
    device_type = (
        parse_device(devices).type if isinstance(devices, (str, torch.device)) else default_device(model, example).type
    )
    world = join(applied_plan.ranks(ranks), mesh, device_type, applied_plan.members)
    applied_plan.check(world, model, device_type)
    order = resolve_order(arguments["schedule"], world.ranks, arguments["microbatches"], arguments["stages_per_rank"])
    check_sums(options.loss, options.reduction, example[1], order.microbatches)
    if verify not in (True, False, None):
        raise ArgumentError(f"verify={verify!r}: expected True, False or None")
    verify_first = bool(os.environ.get(VERIFY)) if verify is None else verify
    first_step = load_provider("verification").first_step(model, loss_fn, mesh) if verify_first else None
    pipe = build(model, example, world, order, options, plan=applied_plan.plan)
    pipe.session.first_step = first_step
    applied_plan.check_rows(world, pipe.session.rows)
    for note in (*options.cutting.ambiguous, *options.loss_notes, *pipe.session.model_parts.loss_notes):
        warn(note)
    return pipe


def build(
    model: nn.Module | Sequence[nn.Module],
    example: Example,
    world: World,
    order: Schedule,
    options: Options,
    *,
    front_end: MakeFrontEnd | None = None,
    plan: Plan | None = None,
) -> Pipeline:
    """Make a pipeline from given processes and a given schedule.

    Args:
        example: one batch: positional and keyword inputs.
        front_end: makes the stages; None: the model is recorded, according to `options`.
        plan: what the pipeline follows, which a recorded run is compared with.
    """
    options.decide("cutting", options.cutting.into(order.microbatches, order.placement.pipelines))
    cut = options.cutting.cut_example(example) if has_values(example) or world.is_local else None
    current = default_device(model, example)
    if world.data_parallel > 1 and not options.broadcast_loss:
        raise ArgumentError(
            "broadcast_loss=False, but the mesh has replicas: each knows only its own part of the batch's loss; leave "
            "broadcast_loss out (result.losses are the microbatches' own)"
        )
    devices = [resolve_device(options.devices, world, rank, current) for rank in range(world.ranks)]
    if options.devices is None and current.type == "cpu" and torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        warn(
            f"this pipeline computes on the CPU, where the model and the example are, although there is {kind}: pass "
            f"devices={str(kind)!r}, or devices='cpu' if that is meant"
        )
    seed = torch.initial_seed() if options.seed is None else options.seed
    timeout = options.heartbeat_timeout
    timeouts = Timeouts() if timeout is None else Timeouts(stall_seconds=timeout, away_seconds=timeout)
    pg_seconds = GROUP_SECONDS if options.pg_timeout is None else options.pg_timeout
    engine = Engine(world, devices, seed, options.transport, timeouts, GroupOptions(pg_seconds, options.pg_options))
    if not world.is_local:
        engine.control.watchdog.position = Position("the building of the pipeline")
    with engine.control.reporting(close=engine.close), one_at_a_time(engine):
        full_example = share_example(engine.control, example)
        cut = cut or options.cutting.cut_example(full_example)
        options.decide("cutting", cut_like(options.cutting, full_example, sum(cut.sizes)))
        _check_same_example(engine, cut.sizes, options)

        split, cut = _split(engine, model, full_example, cut, order, options, front_end)
        if options.grad_dtype is not None:
            with engine.control.agreed():
                accumulate_in(options.grad_dtype, split.all_parameters(), world.divided)
        pipe = Pipeline(Session(engine, split, order, cut, options))
        if options.recorded is not None:
            record(pipe.session, options.recorded, plan)
        engine.control.watchdog.position = OUTSIDE
        return pipe


def _split(
    engine: Engine,
    model: nn.Module | Sequence[nn.Module],
    full_example: Example,
    cut: CutBatch,
    order: Schedule,
    options: Options,
    front_end: MakeFrontEnd | None,
) -> tuple[SplitModel, CutBatch]:
    """Split the model; return it with the example cut to fit. What an attempt reveals is decided in `options`, on all
    ranks alike."""
    depth, streams = order.placement.depth, engine.streams
    while True:
        try:
            with engine.control.agreed():
                if front_end is None:
                    cutter: FrontEnd = Partitioner(
                        model,
                        depth,
                        options.cuts,
                        options.leaf_modules,
                        opens=options.split_inside,
                        balance=options.choice,
                        budget=options.stage_budget(order),
                        streams=streams,
                    )
                else:
                    cutter = front_end(model, depth, streams)
            split = SplitModel(
                cutter,
                Outline.of(cut),
                order.placement,
                engine,
                rule=options.materialize,
                parallelize=options.parallelize,
                loss=options.loss,
            )
            return split, cut
        except SingleRowError:
            options.decide("cutting", options.cutting.in_pairs())
            cut, previous = options.cutting.cut_example(full_example), cut
            if cut.sizes == previous.sizes:
                raise
        except HeldElsewhereError as error:
            if options.cuts is not None or error.cuts is None:
                raise
            options.decide("cuts", error.cuts)
        except TooFewLayersError as error:
            chunks, ranks = depth // order.ranks, pluralize(order.ranks, "rank")
            layout = f"one on each of {ranks}" if chunks == 1 else f"{chunks} on each of {ranks}; {MICROBATCHES_HINT}"
            raise PartitionError(f"{error} ({depth} stages: {layout})") from None


def _check_same_example(engine: Engine, sizes: tuple[int, ...], options: Options) -> None:
    local = (sizes, options.grad_dtype, options.recorded and options.recorded.trace_every)
    gathered = engine.control.gather(local, "its example")
    rows, dtypes = [sum(counts) for counts, *_ in gathered], [str(dtype) for _, dtype, _ in gathered]
    with engine.control.agreed():
        if len(set(dtypes)) > 1:
            raise ArgumentError(
                f"grad_dtype= is {dtypes} on the processes 0..{len(dtypes) - 1}; every process must pass the same"
            )
        if len({recorded for *_, recorded in gathered}) > 1:
            raise ArgumentError(
                "run_dir= is given on some processes only, or with another trace_every; pass the same on every process"
            )
        if len(set(rows)) > 1:
            raise ArgumentError(
                f"the example has {rows} rows on the processes 0..{len(rows) - 1}; each must give one of the same "
                "shape (later batches of replicas may differ)"
            )
