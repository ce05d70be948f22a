"""What is known of a run before its first step: how long one should take, and what each rank should hold.

Memory is what forwards and backwards make on fake tensors, added up by the simulator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from penstock._base.gradients import gradient_bytes
from penstock._base.stages import MODEL_INPUT, StageMeta, needs_backward
from penstock.costs import OPTIMIZER_VALUES
from penstock.partition import Partition
from penstock.partition.measure.footprint import Footprint, footprint
from penstock.partition.values.memory import meta_bytes
from penstock.pipe.session import Session
from penstock.plan import Plan
from penstock.plan.activation_policy import Transient, transient_by_rank
from penstock.schedule import Schedule, drop_backward, stages_with_backward
from penstock.simulate import LinkCost, StageCost, memory, simulate
from penstock.simulate.computations import column
from penstock.simulate.memory_use import changes_of
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
        held = self.parameters + self.gradients + self.optimizer
        return held + self.activations + self.working + self.batch


def optimizer_bytes(parameters: Iterable[Tensor]) -> int:
    """Return the size of AdamW's state for those that are trained, as plans count it."""
    return OPTIMIZER_VALUES * sum(one.nbytes for one in parameters if one.requires_grad)


def memory_of_ranks(
    partition: Partition,
    found: Sequence[Footprint | None],
    order: Schedule,
    asked: torch.dtype | None,
    target_bytes: int,
    *,
    with_loss: bool,
    runs_again: bool,
) -> tuple[RankMemory, ...]:
    """Return the memory of each rank; empty if some stage does not run on fake tensors, or forwards are recomputed and
    backwards are split: what W then needs is not what was kept.

    Args:
        partition: one copy of the model, for one microbatch.
        found: of each stage, without a loss.
        order: computations only.
        asked: the `grad_dtype=` of the run.
        target_bytes: the size of the whole batch's target.
        with_loss: whether a loss follows the last stage.
        runs_again: every forward runs again in its backward.
    """
    metas = [stage.meta for stage in partition.stages]
    prints = [each for each in found if each is not None]
    if with_loss and len(prints) == len(found):
        last = footprint(partition.stages[-1].module, [i.meta for i in metas[-1].inputs], with_loss=True)
        prints = prints[:-1] if last is None else [*prints[:-1], last]
    if len(prints) < len(found) or (runs_again and order.splits):
        return ()
    order = drop_backward(order, [meta.index for meta in metas if not needs_backward(meta)])
    given = [_given(meta) for meta in metas]
    if runs_again:
        received = [sum(meta_bytes(i.meta) for i in meta.inputs) for meta in metas]
        prints = [Footprint(own, each.kept + each.working - own) for own, each in zip(received, prints, strict=True)]
    costs = [StageCost(1, 1, 1, activation_bytes=own, weight_gradient_bytes=own) for own in _kept(prints, given)]
    peaks = [each.peak_activations for each in memory(order, costs, simulate(order, costs))]
    place, depth = order.placement, order.placement.depth
    each = [Transient(own.working, batch) for own, batch in zip(prints, given, strict=True)]
    more = transient_by_rank(place, order.microbatches, each)
    ranks = []
    for rank, (peak, transient) in enumerate(zip(peaks, more, strict=True)):
        stages = place.stages_on(rank)
        parameters = {(s // depth, id(p)): p for s in stages for p in partition.stages[s % depth].parameters.values()}
        buffers = {(s // depth, id(b)): b for s in stages for b in partition.stages[s % depth].buffers.values()}
        trained = [p for p in parameters.values() if p.requires_grad]
        targets = sum(target_bytes // place.pipelines for s in stages if place.is_last(s))
        ranks.append(
            RankMemory(
                sum(tensor.nbytes for tensor in (*parameters.values(), *buffers.values())),
                gradient_bytes(trained, asked),
                optimizer_bytes(trained),
                int(peak),
                int(transient.working),
                int(transient.batch) + targets,
            )
        )
    return tuple(ranks)


def predicted(session: Session, plan: Plan | None) -> RecordedPrediction | None:
    """Predict the step time by the plan that is followed, or by the profile that decided where to cut; None if there is
    neither.

    A plan says what a stage takes in all; then the three parts are taken as equally long.
    """
    order, partition = session.order, session.partition
    costs: Sequence[StageCost] = getattr(partition, "costs", ())  # another front end may have none
    link: LinkCost | None = getattr(partition, "link", None)
    if plan is not None:
        costs, link = [StageCost(one / 3, one / 3, one / 3) for one in plan.stage_seconds], None
    if len(costs) != order.placement.depth:
        return None
    timeline = simulate(order, [*costs] * order.placement.pipelines, link or LinkCost(0.0))
    seconds = tuple(one.forward_seconds + one.backward_seconds for one in costs)
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
    found = [footprint(stage.module, [each.meta for each in stage.meta.inputs]) for stage in partition.stages]
    prints = [each for each in found if each is not None]
    if len(prints) < len(found):
        return ()
    return tuple(_kept(prints, [_given(stage.meta) for stage in partition.stages]))


def _given(meta: StageMeta) -> int:
    """Return the bytes of a stage's share of the model's inputs."""
    return sum(meta_bytes(one.meta) for one in meta.inputs if one.source == MODEL_INPUT)


def _kept(prints: Sequence[Footprint], given: Sequence[int]) -> list[int]:
    """Return the activations of a microbatch on each stage, without the batch, which is there all the time."""
    return [max(0, each.kept - own) for each, own in zip(prints, given, strict=True)]


def memory_after_actions(schedule: Schedule, kept: Sequence[int], held: Sequence[int]) -> list[list[int]]:
    """Return what each rank holds after each of its actions, as `simulate.memory` counts it.

    Args:
        schedule: as it runs, communication included.
        kept: for each stage, what a microbatch keeps from forward to backward.
        held: for each stage, what it holds all the time.
    """
    place, depth = schedule.placement, len(held)
    costs = [(StageCost(0, 0, 0, activation_bytes=own, weight_gradient_bytes=own),) for own in kept]
    costs *= place.stages // depth
    taken, freed = changes_of(costs, stages_with_backward(schedule))[0, ..., 0]
    found = []
    for row, stages in zip(schedule.rows, place.by_rank, strict=True):
        always = sum(held[stage % depth] for stage in stages)
        course = always + np.cumsum((taken - freed)[column(row.op), column(row.stage)])
        found.append(course.astype(int).tolist())
    return found
