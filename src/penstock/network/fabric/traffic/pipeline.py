"""The messages of a pipeline's step: what each rank sends, sums and gathers, in order.

A message is placed where its SEND is in a run of the schedule in which each action starts as soon as it can. So every
rank finds its messages in the order of its row, those that it receives before the work that needs them, and no rank
waits for a message that is produced later than what it could send meanwhile. A sum is placed where its last member
reaches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from math import prod

import torch
from torch import nn

from penstock._base.gradients import BUCKET_BYTES, all_reduce_bytes, buckets, group_by_gradient_dtype
from penstock._base.stages import (
    StageMeta,
    TensorMeta,
    backward_links,
    forward_links,
    shift_stage,
    ties,
    ties_across_ranks,
)
from penstock.network.fabric.steps import Collective
from penstock.network.fabric.traffic.layers import TrainingJob, sharded_bytes, type_name
from penstock.network.fabric.workload import Transfer
from penstock.schedule import Action, Dependencies, Op, Schedule
from penstock.schedule.lowering import UNSHARDED, GatherPlan, lower_training
from penstock.schedule.order import earliest_times, runnable_order

Seconds = tuple[float, float]
"""The times of a stage's forward and whole backward for one microbatch."""


def _metas(job: TrainingJob) -> list[StageMeta]:
    """Return the metadata of all stages, including those of copies of the model."""
    stages = job.recorded.partition.stages
    return [shift_stage(stage.meta, first) for first in range(0, job.order.stages, len(stages)) for stage in stages]


def _tie_groups(job: TrainingJob) -> list[tuple[int, ...]]:
    """Return the sets of stages on several ranks that share parameters."""
    return list(ties_across_ranks(ties(_metas(job)), job.order.placement.rank_of))


def lowered(job: TrainingJob) -> Schedule:
    """Return the schedule as a pipeline runs it: with messages, reductions and gathers. Raise ScheduleError if it is
    illegal."""
    order = job.order
    sharded = GatherPlan(set(range(order.stages))) if job.sharded else UNSHARDED
    return lower_training(order, [_metas(job)], _tie_groups(job), sharded, order if job.replicas > 1 else None)


def transfers(job: TrainingJob, seconds: Sequence[Seconds] | None) -> tuple[list[Transfer], float]:
    """Return what a step sends, and the seconds of computation after the last transfer.

    Args:
        seconds: for each stage of the model; None: computation takes no time, and backward counts as twice as long as
            forward if the order depends on it.
    """
    return _Walk(job, seconds).run()


class _Walk:
    """Walks through the actions of all ranks in the order in which they end, and adds up what each rank computes."""

    def __init__(self, job: TrainingJob, seconds: Sequence[Seconds] | None) -> None:
        self._job = job
        self._order = lowered(job)
        self._times = seconds
        self._computed = [0.0] * job.ranks
        self._transfers: list[Transfer] = []
        self._reached: dict[int, set[int]] = {}
        metas = _metas(job)
        self._tied = ties(metas)
        self._groups = _tie_groups(job)
        self._rank_of = job.order.placement.rank_of
        values = {(i.source, i.name): i.meta for meta in metas for i in meta.inputs}
        links_by_op = {Op.SEND_F: forward_links(metas), Op.SEND_B: backward_links(metas)}
        self._sent = {
            (op, link.source, link.target): [values[value] for value in link.values]
            for op, links in links_by_op.items()
            for link in links
        }
        """The values of each kind of message; gradients have the size of their values."""

    def run(self) -> tuple[list[Transfer], float]:
        dependencies = Dependencies(self._order)
        actions, rank_of = dependencies.actions, dependencies.rank_of
        last = {a.stage: n for n, a in enumerate(actions) if a.op in (Op.B, Op.W)}
        # Only computations take time; of what ends at once, that which others wait for comes first.
        _, ends = earliest_times(dependencies, lambda n: self._seconds(actions[n], ordering=True), lambda *_: 0.0)
        for node in sorted(runnable_order(dependencies), key=ends.__getitem__):
            action = actions[node]
            if action.op.is_compute:
                self._computed[rank_of[node]] += self._seconds(action)
                if self._job.sharded and last.get(action.stage) == node:
                    trained = [parameter for parameter in self._divided(action.stage) if parameter.requires_grad]
                    for suffix, parameters in self._by_dtype(trained):
                        name = f"gradients of stage {action.stage}{suffix}"
                        size = sharded_bytes(parameters, self._job.replicas)
                        self._add_all(name, size, "reduce_scatter", "gradient", self._rank_of[action.stage])
            elif action.op.is_send:
                self._send(action)
            elif action.op is Op.UNSHARD:
                size = sharded_bytes(self._divided(action.stage), self._job.replicas)
                name = f"parameters of stage {action.stage}"
                self._add_all(name, size, "all_gather", "parameters", self._rank_of[action.stage])
            elif action.op is Op.REDUCE_GRAD and action.microbatch is None:
                # What only this stage holds, and what it does not divide.
                divided = [] if self._job.sharded else self._divided(action.stage)
                self._average(rank_of[node], [p for p in divided if p.requires_grad], f"stage {action.stage}")
            elif action.op is Op.REDUCE_GRAD:
                self._sum_tied(action, rank_of[node])
        for rank in range(self._job.ranks) if self._job.replicas > 1 else ():  # once the sums over stages are there
            stages = self._order.placement.stages_on(rank)
            named = chain.from_iterable(self._job.parameters(stage).items() for stage in stages)
            shared = {id(p): p for name, p in named if name in self._tied and p.requires_grad}
            self._average(rank, list(shared.values()), f"tied parameters of rank {rank}")
        return self._transfers, max(self._computed)

    def _seconds(self, action: Action, *, ordering: bool = False) -> float:
        if not action.op.is_compute or (self._times is None and not ordering):
            return 0.0
        depth = self._order.placement.depth
        forward, backward = self._times[action.stage % depth] if self._times else (1.0, 2.0)
        return {Op.F: forward, Op.B: backward}.get(action.op, backward / 2)

    # -- each kind of transfer --------------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        """Send activations: integers and booleans, such as labels and masks, are none."""
        assert action.peer is not None
        values = self._sent[action.op, action.stage, action.peer]
        letter, kind = "B", "activation gradient"
        if action.op is Op.SEND_F:
            dtypes = [getattr(torch, value.dtype) for value in values]
            floats = any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
            letter, kind = "F", "activation" if floats else "integers"
        size = sum(prod(value.shape) * element_bytes(value) for value in values)
        name = f"{letter}{action.microbatch} stage {action.stage}->{action.peer}"
        self._add_each(name, size, "send", kind, (self._rank_of[action.stage], self._rank_of[action.peer]))

    def _average(self, rank: int, parameters: Sequence[nn.Parameter], owner: str) -> None:
        """Average parameters' gradients over replicas, in buckets."""
        for suffix, group in self._by_dtype(parameters):
            pieces = list(buckets(group, BUCKET_BYTES, self._job.gradient_dtype))
            for number, bucket in enumerate(pieces):
                bucket_suffix = f", bucket {number}" if len(pieces) > 1 else ""
                size = all_reduce_bytes(bucket, self._job.gradient_dtype)
                self._add_all(f"gradients of {owner}{bucket_suffix}{suffix}", size, "all_reduce", "gradient", rank)

    def _sum_tied(self, action: Action, rank: int) -> None:
        """Sum the gradients of tied parameters when the last of a group's ranks gets there."""
        assert action.microbatch is not None
        stages = self._groups[action.microbatch]
        members = {self._rank_of[stage] for stage in stages}
        reached = self._reached.setdefault(action.microbatch, set())
        reached.add(rank)
        if reached < members:
            return
        params = self._job.parameters(stages[0])
        tied = [params[name] for name, owners in self._tied.items() if owners == stages and params[name].requires_grad]
        for suffix, group in self._by_dtype(tied):
            name = f"tied gradients of stages {', '.join(map(str, stages))}{suffix}"
            size = all_reduce_bytes(group, self._job.gradient_dtype)
            self._add_each(name, size, "all_reduce", "tied gradient", tuple(sorted(members)))

    # -- what they are made of --------------------------------------------------------------------------------------

    def _divided(self, stage: int) -> list[nn.Parameter]:
        """Return the parameters that replicas divide, if they are sharded; tied ones stay whole."""
        return [parameter for name, parameter in self._job.parameters(stage).items() if name not in self._tied]

    def _by_dtype(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """Yield the parameters by their gradients' dtype, with a suffix for names: empty if there is only one dtype."""
        by_dtype = group_by_gradient_dtype(parameters, self._job.gradient_dtype)
        for dtype, group in by_dtype.items():
            yield f" ({type_name(dtype)})" if len(by_dtype) > 1 else "", group

    def _add_each(self, name: str, size: int, collective: Collective, kind: str, ranks: tuple[int, ...]) -> None:
        """Add one transfer for each replica, among some of its ranks."""
        if not size:
            return
        seconds = tuple(self._take_computed(rank) for rank in ranks)
        for replica in range(self._job.replicas):
            suffix = f" of replica {replica}" if self._job.replicas > 1 else ""
            hosts = tuple(replica * self._job.ranks + rank for rank in ranks)
            self._transfers.append(Transfer(name + suffix, size, collective, hosts, max(seconds), kind, seconds))

    def _add_all(self, name: str, size: int, collective: Collective, kind: str, rank: int) -> None:
        """Add one transfer among the same rank of all replicas."""
        if size:
            hosts = self._job.same_rank(rank)
            self._transfers.append(Transfer(name, size, collective, hosts, self._take_computed(rank), kind))

    def _take_computed(self, rank: int) -> float:
        """Take the time that a rank has computed since its last transfer."""
        seconds, self._computed[rank] = self._computed[rank], 0.0
        return seconds


def element_bytes(meta: TensorMeta) -> int:
    """Return the size of one number of a value."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return dtype.itemsize
