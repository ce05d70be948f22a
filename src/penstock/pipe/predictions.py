"""What is known of a run before its first step: how long one should take, and what each rank should hold.

Memory is what forwards and backwards make on fake tensors, added up in the order of each rank's actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock._base.gradients import gradient_bytes
from penstock._base.memory import meta_bytes
from penstock._base.stages import MODEL_INPUT, StageMeta, needs_backward
from penstock.costs import OPTIMIZER_VALUES
from penstock.partition import Partition
from penstock.partition.measure.footprint import Footprint, footprint
from penstock.pipe.session import Session
from penstock.plan import Plan
from penstock.plan.activation_policy import Transient, transient_by_rank
from penstock.schedule import Schedule, drop_backward
from penstock.simulate import LinkCost, StageCost, simulate
from penstock.simulate.memory_use import activations_by_action
from penstock.trace.runs.reader import RecordedPrediction


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
