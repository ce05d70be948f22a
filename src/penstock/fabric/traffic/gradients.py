"""What replicas of a model send each other: every layer's gradients, in the order in which backward produces them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from penstock._base.gradients import gradient_bytes
from penstock.fabric.traffic.layers import Layer, Recorded, bytes_of, sharded_bytes
from penstock.fabric.workload import Transfer
from penstock.schedule import Placement


@dataclass(frozen=True)
class Replicated:
    """A model with several replicas that are trained together.

    Attributes:
        recorded: the model, cut into the stages of one replica.
        placement: where the stages are on the ranks of one replica.
        hosts: how many, for all replicas: replica d has the hosts d * ranks to (d + 1) * ranks - 1.
        sharded: the replicas divide the parameters among themselves.
        gradient_dtype: as for `penstock.pipeline`.
    """

    recorded: Recorded
    placement: Placement
    hosts: int
    sharded: bool
    gradient_dtype: torch.dtype | None = None

    @property
    def backward(self) -> tuple[Layer, ...]:
        """The layers in the order in which backward finishes them."""
        return tuple(reversed(self.recorded.layers))


@dataclass(frozen=True, slots=True)
class Ready:
    """A transfer, and the number of backward layers after which it can begin; -1: in the forward."""

    transfer: Transfer
    layers: int


def transfers(job: Replicated) -> list[Ready]:
    """The transfers of a step, in order; none if there is only one replica."""
    if job.hosts == job.placement.ranks:
        return []
    return _sharded(job) if job.sharded else sorted(_summed(job), key=lambda ready: ready.layers)


def with_compute(made: Sequence[Ready], forward: float, backward: Sequence[float]) -> list[Transfer]:
    """The transfers with the computation between them.

    Args:
        forward: seconds of all computation before the backward whose gradients are sent.
        backward: seconds by layer, in backward order.
    """
    result, done = [], -1
    for ready in made:
        seconds = forward if done < 0 <= ready.layers else 0.0
        seconds += sum(backward[max(done, 0) : max(ready.layers, 0)])
        done = max(done, ready.layers)
        result.append(replace(ready.transfer, compute_seconds=seconds))
    return result


def shares(job: Replicated, seconds: float) -> list[float]:
    """A backward's seconds, divided among the layers in proportion to what they train."""
    sizes = [bytes_of(layer.trained) for layer in job.backward]
    return [seconds * size / max(sum(sizes), 1) for size in sizes]


def _holders(job: Replicated) -> dict[int, set[int]]:
    """The ranks of a replica that hold each parameter, by its `id`."""
    found: dict[int, set[int]] = {}
    for copy in range(job.placement.pipelines):
        for index, stage in enumerate(job.recorded.partition.stages):
            rank = job.placement.rank_of[copy * job.placement.depth + index]
            for parameter in stage.parameters.values():
                found.setdefault(id(parameter), set()).add(rank)
    return found


def _by_rank(job: Replicated, layer: Layer) -> Iterator[tuple[int, str, list[nn.Parameter]]]:
    """A layer's parameters by the rank that holds them, with a suffix for names: empty if one rank holds them all."""
    holders = _holders(job)
    ranks = sorted(set().union(*(holders.get(id(parameter), set()) for parameter in layer.parameters)))
    for rank in ranks:
        held = [parameter for parameter in layer.parameters if rank in holders.get(id(parameter), ())]
        yield rank, f" on rank {rank}" if len(ranks) > 1 else "", held


def _group(job: Replicated, rank: int) -> tuple[int, ...]:
    """The hosts that are this rank of their replicas; empty if these are all hosts."""
    return tuple(range(rank, job.hosts, job.placement.ranks)) if job.placement.ranks > 1 else ()


def _summed(job: Replicated) -> Iterator[Ready]:
    for place, layer in enumerate(job.backward, start=1):
        for rank, suffix, held in _by_rank(job, layer):
            if trained := [parameter for parameter in held if parameter.requires_grad]:
                size = gradient_bytes(trained, job.gradient_dtype)
                yield Ready(Transfer(layer.name + suffix, size, "all_reduce", _group(job, rank)), place)


def _sharded(job: Replicated) -> list[Ready]:
    """Gathers a layer's parameters for its forward and again for its backward, even if it is frozen."""
    replicas = job.hosts // job.placement.ranks
    made: list[Ready] = []

    def gather(layer: Layer, way: str, behind: int) -> None:
        for rank, suffix, held in _by_rank(job, layer):
            name = f"{layer.name}{suffix}, {way}"
            size = sharded_bytes(held, replicas)
            made.append(Ready(Transfer(name, size, "all_gather", _group(job, rank), 0.0, "parameters"), behind))

    for layer in job.recorded.layers:
        gather(layer, "forward", -1)
    for place, layer in enumerate(job.backward, start=1):
        gather(layer, "backward", place - 1)
        for rank, suffix, held in _by_rank(job, layer):
            size = sharded_bytes([parameter for parameter in held if parameter.requires_grad], replicas)
            if size:
                name = f"{layer.name}{suffix}, gradients"
                made.append(Ready(Transfer(name, size, "reduce_scatter", _group(job, rank)), place))
    return made
