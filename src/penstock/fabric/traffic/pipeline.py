"""The messages of a pipeline's step: what each rank sends, sums and gathers, in order.

A message is placed where its SEND is in a run of the schedule in which each action starts as soon as it can. So every
rank finds its messages in the order of its row, those that it receives before the work that needs them, and no rank
waits for a message that is produced later than what it could send meanwhile. A sum is placed where its last member
reaches it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import torch
from torch import nn

from penstock._base.gradients import BUCKET_BYTES, buckets, by_gradient_dtype, summed_bytes
from penstock._base.stages import (
    Link,
    StageMeta,
    TensorMeta,
    backward_links,
    forward_links,
    shifted,
    ties,
    ties_across_ranks,
)
from penstock.fabric.steps import Collective
from penstock.fabric.traffic.layers import sharded_bytes, type_name
from penstock.fabric.workload import Transfer
from penstock.partition import Partition
from penstock.schedule import Action, Dependencies, Op, Schedule
from penstock.schedule.lowering import UNSHARDED, Sharded, lower_training
from penstock.schedule.order import earliest_times, runnable_order

Seconds = tuple[float, float]
"""The times of a stage's forward and whole backward for one microbatch."""


@dataclass(frozen=True)
class Pipelines:
    """A pipeline and its replicas.

    Attributes:
        partition: the stages of the model.
        order: computations only.
        hosts: how many: replicas times ranks per pipeline. Replica d has the hosts d * ranks to (d + 1) * ranks - 1.
        sharded: the replicas divide the parameters among themselves.
        gradient_dtype: as for `penstock.pipeline`.
    """

    partition: Partition
    order: Schedule
    hosts: int
    sharded: bool
    gradient_dtype: torch.dtype | None = None

    @property
    def ranks(self) -> int:
        return self.order.ranks

    @property
    def replicas(self) -> int:
        return self.hosts // self.ranks

    @property
    def metas(self) -> list[StageMeta]:
        """The metadata of all stages, including those of copies of the model."""
        depth = len(self.partition.stages)
        copies = range(0, self.order.stages, depth)
        return [shifted(stage.meta, first) for first in copies for stage in self.partition.stages]

    def parameters(self, stage: int) -> dict[str, nn.Parameter]:
        return dict(self.partition.stages[stage % len(self.partition.stages)].parameters)

    def same_rank(self, rank: int) -> tuple[int, ...]:
        """The hosts that are this rank of their pipelines."""
        return tuple(range(rank, self.hosts, self.ranks))


def lowered(pipelines: Pipelines) -> Schedule:
    """The schedule as a pipeline runs it: with messages, reductions and gathers. Raises ScheduleError."""
    order, ties_between = pipelines.order, _tie_groups(pipelines)
    sharded = Sharded(set(range(order.stages))) if pipelines.sharded else UNSHARDED
    return lower_training(order, [pipelines.metas], ties_between, sharded, order if pipelines.replicas > 1 else None)


def _tie_groups(pipelines: Pipelines) -> list[tuple[int, ...]]:
    """The sets of stages on several ranks that share parameters."""
    return list(ties_across_ranks(ties(pipelines.metas), pipelines.order.placement.rank_of))


def transfers(pipelines: Pipelines, seconds: Sequence[Seconds] | None) -> tuple[list[Transfer], float]:
    """What a step sends, and the seconds of computation after the last transfer.

    Args:
        seconds: for each stage of the model; None: computation takes no time, and backward counts as twice as long as
            forward if the order depends on it.
    """
    return _Walk(pipelines, seconds).run()


@dataclass(frozen=True, slots=True)
class _Sent:
    """A transfer without its time and hosts."""

    name: str
    bytes: int
    collective: Collective
    kind: str


class _Walk:
    """Walks through the actions of all ranks in the order in which they end, and adds up what each rank computes."""

    def __init__(self, pipelines: Pipelines, seconds: Sequence[Seconds] | None) -> None:
        self._pipelines = pipelines
        self._order = lowered(pipelines)
        self._times = seconds
        self._computed = [0.0] * pipelines.ranks
        self._made: list[Transfer] = []
        self._reached: dict[int, set[int]] = {}
        metas = pipelines.metas
        self._tied = ties(metas)
        self._groups = _tie_groups(pipelines)
        self._rank_of = pipelines.order.placement.rank_of
        self._kinds = {(link.source, link.target): _kind(link, metas) for link in forward_links(metas)}
        self._bytes = {
            **{(Op.SEND_F, link.source, link.target): _link_bytes(link, metas) for link in forward_links(metas)},
            **{(Op.SEND_B, link.source, link.target): _link_bytes(link, metas) for link in backward_links(metas)},
        }

    def run(self) -> tuple[list[Transfer], float]:
        dependencies = Dependencies(self._order)
        actions, rank_of = dependencies.actions, dependencies.rank_of
        last = {a.stage: n for n, a in enumerate(actions) if a.op in (Op.B, Op.W)}
        for node in _by_time(dependencies, lambda n: self._seconds(actions[n], ordering=True)):
            action = actions[node]
            if action.op.is_compute:
                self._computed[rank_of[node]] += self._seconds(action)
                if self._pipelines.sharded and last.get(action.stage) == node:
                    self._scatter(action.stage)
            elif action.op.is_send:
                self._send(action)
            elif action.op is Op.UNSHARD:
                self._gather(action.stage)
            elif action.op is Op.REDUCE_GRAD and action.microbatch is None:
                self._average(rank_of[node], self._own(action.stage), f"stage {action.stage}")
            elif action.op is Op.REDUCE_GRAD:
                self._sum_tied(action, rank_of[node])
        self._average_tied()
        return self._made, max(self._computed)

    def _seconds(self, action: Action, *, ordering: bool = False) -> float:
        if not action.op.is_compute or (self._times is None and not ordering):
            return 0.0
        forward, backward = (
            (1.0, 2.0) if self._times is None else self._times[action.stage % self._order.placement.depth]
        )
        return {Op.F: forward, Op.B: backward}.get(action.op, backward / 2)

    # -- each kind of transfer --------------------------------------------------------------------------------------

    def _send(self, action: Action) -> None:
        assert action.peer is not None
        forward = action.op is Op.SEND_F
        letter, kind = ("F", self._kinds[action.stage, action.peer]) if forward else ("B", "activation gradient")
        name = f"{letter}{action.microbatch} stage {action.stage}->{action.peer}"
        size = self._bytes[action.op, action.stage, action.peer]
        self._add_each(_Sent(name, size, "send", kind), (self._rank_of[action.stage], self._rank_of[action.peer]))

    def _gather(self, stage: int) -> None:
        size = sharded_bytes(self._divided(stage), self._pipelines.replicas)
        sent = _Sent(f"parameters of stage {stage}", size, "all_gather", "parameters")
        self._add_all(sent, self._rank_of[stage])

    def _scatter(self, stage: int) -> None:
        trained = [parameter for parameter in self._divided(stage) if parameter.requires_grad]
        for suffix, some in self._by_dtype(trained):
            size = sharded_bytes(some, self._pipelines.replicas)
            sent = _Sent(f"gradients of stage {stage}{suffix}", size, "reduce_scatter", "gradient")
            self._add_all(sent, self._rank_of[stage])

    def _average(self, rank: int, parameters: Sequence[nn.Parameter], what: str) -> None:
        """Averages parameters' gradients over replicas, in buckets."""
        for suffix, some in self._by_dtype(parameters):
            pieces = list(buckets(some, BUCKET_BYTES, self._pipelines.gradient_dtype))
            for number, bucket in enumerate(pieces):
                place = f", bucket {number}" if len(pieces) > 1 else ""
                self._add_all(
                    _Sent(f"gradients of {what}{place}{suffix}", self._summed(bucket), "all_reduce", "gradient"), rank
                )

    def _sum_tied(self, action: Action, rank: int) -> None:
        """Sums the gradients of tied parameters when the last of a group's ranks gets there."""
        assert action.microbatch is not None
        stages = self._groups[action.microbatch]
        members = {self._rank_of[stage] for stage in stages}
        reached = self._reached.setdefault(action.microbatch, set())
        reached.add(rank)
        if reached < members:
            return
        held = self._pipelines.parameters(stages[0])
        tied = [held[name] for name, on in self._tied.items() if on == stages and held[name].requires_grad]
        of = f"stages {', '.join(map(str, stages))}"
        for suffix, some in self._by_dtype(tied):
            sent = _Sent(f"tied gradients of {of}{suffix}", self._summed(some), "all_reduce", "tied gradient")
            self._add_each(sent, tuple(sorted(members)))

    def _average_tied(self) -> None:
        """Averages tied parameters over replicas, once the sums over stages are there."""
        for rank in range(self._pipelines.ranks) if self._pipelines.replicas > 1 else ():
            held = chain.from_iterable(
                self._pipelines.parameters(stage).items() for stage in self._order.placement.stages_on(rank)
            )
            shared = {id(p): p for name, p in held if name in self._tied and p.requires_grad}
            self._average(rank, list(shared.values()), f"tied parameters of rank {rank}")

    # -- what they are made of --------------------------------------------------------------------------------------

    def _own(self, stage: int) -> list[nn.Parameter]:
        """The parameters that only this stage holds, and that it trains and does not divide."""
        if self._pipelines.sharded:
            return []
        held = self._pipelines.parameters(stage)
        return [one for name, one in held.items() if one.requires_grad and name not in self._tied]

    def _divided(self, stage: int) -> list[nn.Parameter]:
        """The parameters that replicas divide; tied ones stay whole."""
        return [one for name, one in self._pipelines.parameters(stage).items() if name not in self._tied]

    def _by_dtype(self, parameters: Iterable[nn.Parameter]) -> Iterator[tuple[str, list[nn.Parameter]]]:
        """The parameters by their gradients' dtype, with a suffix for names: empty if there is only one dtype."""
        found = by_gradient_dtype(parameters, self._pipelines.gradient_dtype)
        for dtype, some in found.items():
            yield f" ({type_name(dtype)})" if len(found) > 1 else "", some

    def _summed(self, parameters: Iterable[nn.Parameter]) -> int:
        return summed_bytes(parameters, self._pipelines.gradient_dtype)

    def _add_each(self, sent: _Sent, ranks: tuple[int, ...]) -> None:
        """Adds one transfer for each replica, among some of its ranks."""
        if not sent.bytes:
            return
        seconds = tuple(self._take(rank) for rank in ranks)
        for replica in range(self._pipelines.replicas):
            name = sent.name + (f" of replica {replica}" if self._pipelines.replicas > 1 else "")
            hosts = tuple(replica * self._pipelines.ranks + rank for rank in ranks)
            self._made.append(Transfer(name, sent.bytes, sent.collective, hosts, max(seconds), sent.kind, seconds))

    def _add_all(self, sent: _Sent, rank: int) -> None:
        """Adds one transfer among the same rank of all replicas."""
        if sent.bytes:
            hosts = self._pipelines.same_rank(rank)
            seconds = self._take(rank)
            self._made.append(Transfer(sent.name, sent.bytes, sent.collective, hosts, seconds, sent.kind))

    def _take(self, rank: int) -> float:
        """Takes the time that a rank has computed since its last transfer."""
        seconds, self._computed[rank] = self._computed[rank], 0.0
        return seconds


def _by_time(dependencies: Dependencies, duration: Callable[[int], float]) -> list[int]:
    """The nodes by end time, where only computations take time; those that others wait for come first."""
    order = runnable_order(dependencies)
    _, ends = earliest_times(dependencies, duration, lambda _before, _node: 0.0)
    return sorted(order, key=ends.__getitem__)


def _link_bytes(link: Link, metas: Sequence[StageMeta]) -> int:
    """The size of the values of one microbatch; gradients have the size of their values."""
    sizes = {(i.source, i.name): prod(i.meta.shape) * element_bytes(i.meta) for meta in metas for i in meta.inputs}
    return sum(sizes[value] for value in link.values)


def _kind(link: Link, metas: Sequence[StageMeta]) -> str:
    """The kind of message: integers and booleans, such as labels and masks, are not activations."""
    types = {(i.source, i.name): i.meta.dtype for meta in metas for i in meta.inputs}
    found = [getattr(torch, types[value]) for value in link.values]
    return "activation" if any(dtype.is_floating_point or dtype.is_complex for dtype in found) else "integers"


def element_bytes(meta: TensorMeta) -> int:
    """The size of one number of a value."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return dtype.itemsize
