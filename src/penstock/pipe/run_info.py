"""What is known of a run before its first step: what the folder of a run says of its pipeline, how long a step should
take, and what each rank should hold; and the beginning of its recording.

Memory is what forwards and backwards make on fake tensors, added up in the order of each rank's actions.
"""

from __future__ import annotations

import math
import os
import socket
import uuid
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock._base import __version__, owner
from penstock._base.errors import ArgumentError, warn
from penstock._base.gradients import gradient_bytes
from penstock._base.memory import meta_bytes
from penstock._base.stages import MODEL_INPUT, StageMeta, needs_backward
from penstock.costs import OPTIMIZER_VALUES
from penstock.partition import Partition
from penstock.partition.measure.footprint import Footprint, footprint
from penstock.partition.names import unwrapped
from penstock.partition.stages.stage import Gate
from penstock.pipe.run_recorder import Recorder
from penstock.pipe.session import Session
from penstock.pipe.verified import verified_fingerprints
from penstock.plan import Plan
from penstock.plan.activation_policy import Transient, transient_by_rank
from penstock.runtime.front_end import Stage
from penstock.schedule import Schedule, drop_backward
from penstock.simulate import LinkCost, StageCost, simulate
from penstock.simulate.memory_use import activations_by_action, memory_after_actions
from penstock.trace.runs.about import RunInfo
from penstock.trace.runs.folder import PREDICTED, PREDICTED_MEMORY
from penstock.trace.runs.option import RunConfig
from penstock.trace.runs.reader import RecordedPrediction
from penstock.trace.runs.writer import earlier_run


def record(session: Session, config: RunConfig, plan: Plan | None = None) -> None:
    """Record the session's steps from now on, as far as this process has a part in it. Every rank calls it.

    Args:
        plan: what the pipeline follows.

    Raises:
        ArgumentError: the folder has a run of another version or tool, or another job writes there.
    """
    engine = session.engine
    path, refusal = Path(config.path), None
    if engine.world.is_first:
        try:
            owner.claim(path, session, f"run_dir={str(path)!r}")
        except ArgumentError as error:
            refusal = str(error)
        except OSError as error:
            if os.path.isdir(path):  # otherwise the recorder warns of it; training goes on
                warn(f"run_dir={str(path)!r}: {error}; a second job in this folder will not be detected")
    run_id, refusal = engine.control.share((uuid.uuid4().hex, refusal), role="everyone")
    if refusal is not None:
        raise ArgumentError(refusal)
    info = previous = None
    initial: dict[str, Any] = {}
    with engine.control.agreed():
        if engine.world.is_first:
            previous = earlier_run(path)
            info = describe(session, config, run_id, plan)
            initial = _initial_files(session, info, plan)
    verified_mark = engine.control.share("" if previous is None else previous.verified, role="everyone")
    verified_fingerprints.update({verified_mark} & {session.fingerprint()})
    recorder = Recorder(config, run_id, info, previous, initial, engine.world, engine.control.watchdog, engine.devices)
    weakref.finalize(session, recorder.end_now)  # if it is dropped, or the program ends, without `close`
    session.on_close(recorder.close)
    session.recorder = recorder


def _initial_files(session: Session, info: RunInfo, plan: Plan | None) -> dict[str, Any]:
    """Return what is known before the first step, by file."""
    files: dict[str, Any] = {}
    if (step := predict_step(session, plan)) is not None:
        files[PREDICTED] = {
            "source": step.source,
            "step_seconds": step.step_seconds,
            "stage_seconds": [*step.stage_seconds],
            "timeline": step.timeline.to_dict(),
        }
    if info.activation_bytes:
        states = [optimizer_bytes(stage.parameters.values()) for stage in session.partition.stages]
        static_bytes = [sum(sizes) for sizes in zip(info.parameter_bytes, info.gradient_bytes, states, strict=True)]
        files[PREDICTED_MEMORY] = memory_after_actions(session.schedule, info.activation_bytes, static_bytes)
    return files


def describe(session: Session, config: RunConfig, run_id: str, plan: Plan | None = None) -> RunInfo:
    """Return what does not change in a run that begins now, with the plan that it follows."""
    options, order, world, partition = session.options, session.order, session.engine.world, session.partition
    placement, device = order.placement, session.device
    parameters = [[*stage.parameters.values()] for stage in partition.stages]
    limit = options.memory_limit
    if plan is not None and len({*plan.limit_bytes}) == 1 and math.isfinite(plan.limit_bytes[0]):
        limit = plan.limit_bytes[0]
    trained = [[p for p in stage_parameters if p.requires_grad] for stage_parameters in parameters]
    return RunInfo(
        name=os.path.basename(os.path.abspath(config.path)),
        id=run_id,
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        resumed=(),
        penstock=__version__,
        torch=str(torch.__version__),
        host=socket.gethostname(),
        threads=torch.get_num_threads() if device.type == "cpu" else 0,
        device=device.type if device.type != "cuda" else f"cuda: {torch.cuda.get_device_name(device)}",
        model=type(session.model_parts.model).__name__,
        ranks=world.ranks,
        replicas=world.data_parallel,
        processes=1 if world.is_local else len(world.everyone),
        chunks=placement.depth // world.ranks,
        schedule=order.name,
        microbatches=order.microbatches,
        rows=session.rows * world.data_parallel,
        placement=str(placement),
        cuts=tuple(session.model_parts.cuts),
        units=tuple(module_names(stage) for stage in partition.stages),
        parameters=sum(p.numel() for p in session.model_parts.model.parameters()),
        parameter_bytes=tuple(sum(p.nbytes for p in stage_parameters) for stage_parameters in parameters),
        gradient_bytes=tuple(gradient_bytes(stage_parameters, options.grad_dtype) for stage_parameters in trained),
        activation_bytes=activation_bytes(session),
        memory_limit=limit,
        total_steps=config.total_steps,
    )


def module_names(stage: Stage) -> tuple[str, ...]:
    """Return the names of the modules that run on a stage, none within another; none where it has no graph."""
    module, names = stage.module, dict[str, None]()
    graph: Any = getattr(module, "graph", None)
    for node in () if graph is None else graph.nodes:
        if node.op == "call_module":
            submodule = module.get_submodule(str(node.target))
            nodes = submodule.inside.graph.nodes if isinstance(submodule, Gate) else (node,)
            names.update({unwrapped(str(n.target)): None for n in nodes if n.op == "call_module"})
    return tuple(names)


# -- predictions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that a rank needs in a training step, as predicted.

    Attributes:
        parameters: of its stages, with buffers; what several of them share counts once.
        gradients: of these, in the dtype in which they accumulate.
        optimizer: the state of one with two values for each trained parameter (Adam), as plans count it.
        activations: what its microbatches keep for their backwards, at most at once.
        working: what a forward or backward takes besides while it runs, at most.
        batch: the batch's pieces that wait for their forward, and targets.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    working: int
    batch: int

    @property
    def peak(self) -> int:
        """The most at once. If the backward is split, W is taken to need as much as the forward keeps."""
        static = self.parameters + self.gradients + self.optimizer
        return static + self.activations + self.working + self.batch


def optimizer_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the size of AdamW's state for those that are trained, as plans count it."""
    return OPTIMIZER_VALUES * sum(p.nbytes for p in parameters if p.requires_grad)


def predict_rank_memory(
    partition: Partition,
    footprints: Sequence[Footprint | None],
    order: Schedule,
    dtype: torch.dtype | None,
    target_bytes: int,
    *,
    with_loss: bool,
    recomputes: bool,
) -> tuple[RankMemory, ...]:
    """Return the memory of each rank; empty if some stage does not run on fake tensors, or forwards are recomputed and
    backwards are split: what W then needs is not what was kept.

    Args:
        partition: one copy of the model, for one microbatch.
        footprints: of each stage, without a loss.
        order: computations only.
        dtype: the `grad_dtype=` of the run.
        target_bytes: the size of the whole batch's target.
        with_loss: whether a loss follows the last stage.
        recomputes: whether every forward is recomputed in its backward.
    """
    metas = [stage.meta for stage in partition.stages]
    complete = [f for f in footprints if f is not None]
    if with_loss and len(complete) == len(footprints):
        last = footprint(partition.stages[-1].module, [i.meta for i in metas[-1].inputs], with_loss=True)
        complete = complete[:-1] if last is None else [*complete[:-1], last]
    if len(complete) < len(footprints) or (recomputes and order.splits):
        return ()
    order = drop_backward(order, [meta.index for meta in metas if not needs_backward(meta)])
    input_bytes = [_model_input_bytes(meta) for meta in metas]
    if recomputes:
        received = [sum(meta_bytes(i.meta) for i in meta.inputs) for meta in metas]
        complete = [Footprint(size, f.kept + f.working - size) for size, f in zip(received, complete, strict=True)]
    activations = _net_activations(complete, input_bytes)
    costs = [StageCost(1, 1, 1, activation_bytes=size, weight_gradient_bytes=size) for size in activations]
    peaks = [held.max(initial=0.0) for held, _ in activations_by_action(order, costs)]
    placement, depth = order.placement, order.placement.depth
    transients = [Transient(f.working, size) for f, size in zip(complete, input_bytes, strict=True)]
    by_rank = transient_by_rank(placement, order.microbatches, transients)
    ranks = []
    for rank, (peak, transient) in enumerate(zip(peaks, by_rank, strict=True)):
        stages = placement.stages_on(rank)
        parameters = {(s // depth, id(p)): p for s in stages for p in partition.stages[s % depth].parameters.values()}
        buffers = {(s // depth, id(b)): b for s in stages for b in partition.stages[s % depth].buffers.values()}
        trained = [p for p in parameters.values() if p.requires_grad]
        targets = sum(target_bytes // placement.pipelines for s in stages if placement.is_last(s))
        ranks.append(
            RankMemory(
                sum(tensor.nbytes for tensor in (*parameters.values(), *buffers.values())),
                gradient_bytes(trained, dtype),
                optimizer_bytes(trained),
                int(peak),
                int(transient.working),
                int(transient.batch) + targets,
            )
        )
    return tuple(ranks)


def predict_step(session: Session, plan: Plan | None) -> RecordedPrediction | None:
    """Predict the step time by the plan that is followed, or by the profile that decided where to cut; None if there is
    neither.

    A plan says what a stage takes in all; then the three parts are taken as equally long.
    """
    order, partition = session.order, session.partition
    costs: Sequence[StageCost] = getattr(partition, "costs", ())  # another front end may have none
    link: LinkCost | None = getattr(partition, "link", None)
    if plan is not None:
        costs, link = [StageCost(c / 3, c / 3, c / 3) for c in plan.stage_seconds], None
    if len(costs) != order.placement.depth:
        return None
    timeline = simulate(order, [*costs] * order.placement.pipelines, link or LinkCost(0.0))
    seconds = tuple(c.forward_seconds + c.backward_seconds for c in costs)
    if plan is not None:
        return RecordedPrediction("the plan", plan.pipeline_seconds + plan.reduce_seconds, seconds, timeline)
    source = "the times measured to cut the model" if session.options.choice.profile is None else "the profile"
    return RecordedPrediction(source, timeline.makespan_seconds, seconds, timeline)


def activation_bytes(session: Session) -> tuple[int, ...]:
    """Return, for each stage, the activations of one microbatch by forwards on fake tensors; empty if a stage does not
    run on these, or if activations are recomputed or offloaded."""
    options, partition = session.options, session.partition
    if options.recompute != "never" or options.offload:
        return ()
    footprints = [footprint(stage.module, [i.meta for i in stage.meta.inputs]) for stage in partition.stages]
    complete = [f for f in footprints if f is not None]
    if len(complete) < len(footprints):
        return ()
    return tuple(_net_activations(complete, [_model_input_bytes(stage.meta) for stage in partition.stages]))


def _model_input_bytes(meta: StageMeta) -> int:
    """Return the bytes of a stage's share of the model's inputs."""
    return sum(meta_bytes(value.meta) for value in meta.inputs if value.source == MODEL_INPUT)


def _net_activations(footprints: Sequence[Footprint], input_bytes: Sequence[int]) -> list[int]:
    """Return the activations of a microbatch on each stage, without the batch, which is there all the time."""
    return [max(0, f.kept - size) for f, size in zip(footprints, input_bytes, strict=True)]
