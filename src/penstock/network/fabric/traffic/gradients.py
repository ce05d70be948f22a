"""What replicas of a model send each other: every layer's gradients, in the order in which backward produces them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import nn

from penstock._base.gradients import gradient_bytes
from penstock.network.fabric.traffic.layers import Layer, TrainingJob, sharded_bytes
from penstock.network.fabric.workload import Transfer

Ready = tuple[int, Transfer]
"""A transfer, and the number of backward layers after which it can begin; -1: in the forward."""


def backward_layers(job: TrainingJob) -> tuple[Layer, ...]:
    """Return the layers in the order in which backward finishes them."""
    return job.recorded.layers[::-1]


def transfers(job: TrainingJob, forward: float, backward: Sequence[float]) -> list[Transfer]:
    """Return the transfers of a step, in order, with the computation between them; none if there is only one replica.

    Args:
        forward: seconds of all computation before the backward whose gradients are sent.
        backward: seconds by layer, in backward order.
    """
    timed: list[Transfer] = []
    done = -1
    for layers, transfer in _sharded(job) if job.sharded else _all_reduced(job):
        seconds = forward if done < 0 <= layers else 0.0
        seconds += sum(backward[max(done, 0) : max(layers, 0)])
        done = max(done, layers)
        timed.append(replace(transfer, compute_seconds=seconds))
    return timed if job.replicas > 1 else []


def shares(job: TrainingJob, seconds: float) -> list[float]:
    """Divide a backward's seconds among the layers in proportion to what they train."""
    sizes = [sum(parameter.nbytes for parameter in layer.trained) for layer in backward_layers(job)]
    return [seconds * size / max(sum(sizes), 1) for size in sizes]


def _by_holder(job: TrainingJob, layer: Layer) -> Iterator[tuple[str, tuple[int, ...], list[nn.Parameter]]]:
    """Yield a layer's parameters by the rank that holds them, with that rank's hosts, empty if these are all hosts, and
    a suffix for names: empty if one rank holds them all."""
    ids: dict[int, set[int]] = {}
    for stage, rank in enumerate(job.order.placement.rank_of):
        ids.setdefault(rank, set()).update(map(id, job.parameters(stage).values()))
    by_rank = {rank: [p for p in layer.parameters if id(p) in ids[rank]] for rank in sorted(ids)}
    several = sum(map(bool, by_rank.values())) > 1
    for rank, parameters in by_rank.items():
        if parameters:
            yield f" on rank {rank}" if several else "", job.same_rank(rank) if job.ranks > 1 else (), parameters


def _all_reduced(job: TrainingJob) -> Iterator[Ready]:
    for number, layer in enumerate(backward_layers(job), start=1):
        for suffix, hosts, parameters in _by_holder(job, layer):
            if trained := [parameter for parameter in parameters if parameter.requires_grad]:
                size = gradient_bytes(trained, job.gradient_dtype)
                yield number, Transfer(layer.name + suffix, size, "all_reduce", hosts)


def _sharded(job: TrainingJob) -> Iterator[Ready]:
    """Gather a layer's parameters for its forward and again for its backward, even if it is frozen."""
    forward = [(-1, layer, "forward") for layer in job.recorded.layers]
    backward = [(number, layer, "backward") for number, layer in enumerate(backward_layers(job))]
    for after, layer, phase in forward + backward:
        for suffix, hosts, parameters in _by_holder(job, layer):
            size = sharded_bytes(parameters, job.replicas)
            yield after, Transfer(f"{layer.name}{suffix}, {phase}", size, "all_gather", hosts, 0.0, "parameters")
        for suffix, hosts, parameters in _by_holder(job, layer) if phase == "backward" else ():
            if size := sharded_bytes([parameter for parameter in parameters if parameter.requires_grad], job.replicas):
                name = f"{layer.name}{suffix}, gradients"
                yield after + 1, Transfer(name, size, "reduce_scatter", hosts)
