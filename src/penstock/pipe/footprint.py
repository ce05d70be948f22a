"""How much memory each rank takes: what forwards and backwards make on fake tensors, added up by the simulator."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from penstock.gradients import gradient_bytes
from penstock.partition import Partition
from penstock.partition.measure.footprint import Footprint, footprint
from penstock.partition.values.memory import meta_bytes
from penstock.plan.besides import Besides, besides
from penstock.schedule import Schedule, drop_backward
from penstock.simulate import StageCost, memory, simulate
from penstock.stages import MODEL_INPUT, needs_backward


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The bytes that a rank needs in a training step, as predicted.

    Attributes:
        parameters: of its stages, with buffers; what several of them share counts once.
        gradients: of these, in the dtype in which they accumulate.
        activations: what its microbatches keep for their backwards, at most at once.
        working: what a forward or backward takes besides while it runs, at most.
        batch: the batch's pieces that wait for their forward, and targets.
    """

    parameters: int
    gradients: int
    activations: int
    working: int
    batch: int

    @property
    def peak(self) -> int:
        """The most at once. If the backward is split, W is taken to need as much as the forward keeps."""
        return self.parameters + self.gradients + self.activations + self.working + self.batch


def memory_of_ranks(
    partition: Partition,
    order: Schedule,
    asked: torch.dtype | None,
    target_bytes: int,
    *,
    with_loss: bool,
    runs_again: bool,
) -> tuple[RankMemory, ...]:
    """What each rank needs; empty if some stage does not run on fake tensors, or forwards run again and backwards are
    split: what W then needs is not what was kept.

    Args:
        partition: one copy of the model, for one microbatch.
        order: computations only.
        asked: the `gradient_dtype=` of the run.
        target_bytes: the size of the whole batch's target.
        with_loss: whether a loss follows the last stage.
        runs_again: every forward runs again in its backward.
    """
    metas = [stage.meta for stage in partition.stages]
    last = len(metas) - 1
    found = [
        footprint(stage.module, [i.meta for i in stage.meta.inputs], with_loss=with_loss and stage.meta.index == last)
        for stage in partition.stages
    ]
    prints = [each for each in found if each is not None]
    if len(prints) < len(found) or (runs_again and order.splits):
        return ()
    order = drop_backward(order, [meta.index for meta in metas if not needs_backward(meta)])
    given = [sum(meta_bytes(i.meta) for i in meta.inputs if i.source == MODEL_INPUT) for meta in metas]
    if runs_again:
        received = [sum(meta_bytes(i.meta) for i in meta.inputs) for meta in metas]
        prints = [Footprint(own, each.kept + each.working - own) for own, each in zip(received, prints, strict=True)]
    waiting = [max(each.kept - own, 0) for own, each in zip(given, prints, strict=True)]
    costs = [StageCost(1, 1, 1, activation_bytes=held, weight_gradient_bytes=held) for held in waiting]
    peaks = [each.peak_activations for each in memory(order, costs, simulate(order, costs))]
    place, depth = order.placement, order.placement.depth
    more = besides(place, order.microbatches, [Besides(p.working, own) for p, own in zip(prints, given, strict=True)])
    ranks = []
    for rank, (peak, besides_it) in enumerate(zip(peaks, more, strict=True)):
        stages = place.stages_on(rank)
        parameters = {(s // depth, id(p)): p for s in stages for p in partition.stages[s % depth].parameters.values()}
        buffers = {(s // depth, id(b)): b for s in stages for b in partition.stages[s % depth].buffers.values()}
        targets = sum(target_bytes // place.pipelines for s in stages if place.is_last(s))
        ranks.append(
            RankMemory(
                sum(tensor.nbytes for tensor in (*parameters.values(), *buffers.values())),
                gradient_bytes([p for p in parameters.values() if p.requires_grad], asked),
                int(peak),
                int(besides_it.working),
                int(besides_it.batch) + targets,
            )
        )
    return tuple(ranks)
