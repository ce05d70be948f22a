"""What a model's training step sends, as a workload for the fabric, from its layers, stages and schedule.

layers.py    the layers, in the order in which the forward uses them
gradients.py what replicas of them send each other
pipeline.py  the messages of a pipeline, from its schedule
tensor.py    what hosts send that divide each layer
measure.py   how long layers and stages compute on this machine
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import torch
from torch import nn

from penstock._base.aliases import accept_aliases
from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock._base.gradients import check_grad_dtype, gradient_dtype, group_by_gradient_dtype
from penstock._base.stages import MODEL_INPUT
from penstock.network.fabric.traffic import gradients, measure, pipeline, tensor
from penstock.network.fabric.traffic.layers import Job, ModelRecord, record
from penstock.network.fabric.workload import Workload
from penstock.partition.given_model import as_module
from penstock.schedule import Schedule
from penstock.schedule.lowering import resolve_order

__all__ = ["Compute", "Traffic", "from_model"]

Traffic = Literal["gradients", "pipeline", "tensor", "sharded"]
"""What is sent; see `from_model`."""

Compute = Literal["none", "measure"] | float
"""No time; measured here; or the seconds of a stage's forward of one microbatch (its backward takes twice that)."""


@accept_aliases(opens="split_inside", gradient_dtype="grad_dtype")
def from_model(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    hosts: int,
    ranks: int = 1,
    traffic: Traffic = "gradients",
    schedule: str | Schedule = "1f1b",
    microbatches: int | None = None,
    cuts: Sequence[str] | None = None,
    split_inside: Sequence[str] | None = None,
    sharded: bool = False,
    compute: Compute = "none",
    grad_dtype: torch.dtype | None = None,
) -> Workload:
    """Return the transfers of one training step of a model, in order. Nothing is computed, except for measuring.

    "gradients": replicas of the whole model (or, with `ranks`, of its stages) sum each layer's gradients, in the order
    in which backward finishes them. A layer is a module that holds parameters itself; frozen parameters are left out,
    and tied ones are sent once. Sharded: each layer's parameters are gathered for the forward, and again for the
    backward, which scatters its gradients.

    "pipeline": activations and their gradients from stage to stage in the order of the schedule, sums of tied
    parameters' gradients among the ranks that hold them, and sums of each stage's gradients over the replicas after its
    last backward. Sharded: a stage's parameters are gathered before its first forward, its gradients scattered in its
    last backward.

    "tensor": each layer's matrix is divided among all hosts, which combine activations and their gradients; see
    `tensor`.

    "sharded": "gradients" with `sharded=True`.

    Args:
        model, args, kwargs: a module, or a list of layers, and the inputs of one microbatch.
        hosts: ranks * replicas. Replica d has the hosts d * ranks to (d + 1) * ranks - 1, as a mesh (dp, pp) has them.
        ranks: how many each pipeline has.
        schedule, microbatches, cuts, split_inside: as `penstock.pipeline` takes them. Without a
            pipeline, microbatches (1 by default) are those whose gradients are accumulated before they are sent.
        sharded: the replicas divide the parameters among themselves, like FSDP2 (`fully_shard`).
        compute: what is put in front of the transfers; see `Compute`.
        grad_dtype: as for `penstock.pipeline`: gradients of parameters in lower precision are summed in this dtype.

    Raises:
        ArgumentError: an argument is invalid, or nothing would be sent.
        PartitionError: the model cannot be recorded or cut.
        ScheduleError: the schedule cannot be run.
    """
    if traffic not in get_args(Traffic):
        raise ArgumentError(f"traffic={traffic!r}: expected one of {', '.join(map(repr, get_args(Traffic)))}")
    if traffic == "sharded":
        traffic, sharded = "gradients", True
    _check(hosts, ranks, traffic, sharded, compute)
    module = as_module(model)
    inputs = module, args, kwargs or {}
    _check_dtype(grad_dtype, module, traffic, sharded)
    seconds = 0.0 if isinstance(compute, str) else float(compute)
    if traffic == "tensor":
        return _tensor_workload(record(*inputs, 1), type(module).__name__, hosts, microbatches or 1, seconds)
    order = resolve_order(schedule, ranks, microbatches, None)
    depth = order.placement.depth
    options: dict[str, Any] = {"cuts": cuts, "opens": split_inside, "balance": "flops"}
    job = Job(record(*inputs, depth, **options), order, hosts, sharded, grad_dtype)
    if traffic == "pipeline":
        stages = None if compute == "none" else [(seconds, 2 * seconds)] * depth
        if compute == "measure":
            stages = measure.stage_seconds(*inputs, depth, **options)
        transfers, after = pipeline.transfers(job, stages)
    else:
        forward, backward = seconds * depth, gradients.shares(job, 2 * seconds * depth)
        trained = any(parameter.requires_grad for parameter in module.parameters())
        if compute == "measure" and job.replicas > 1 and trained:
            forward, backward = measure.layer_seconds(module, gradients.backward_layers(job), *inputs[1:])
        count = microbatches or 1  # of which the last one's gradients are sent
        transfers, after = gradients.transfers(job, count * forward + (count - 1) * sum(backward), backward), 0.0
    if not transfers:
        raise ArgumentError(
            f"traffic={traffic!r} of {pluralize(ranks, 'rank')} on {pluralize(hosts, 'host')} sends nothing: "
            "replicas send gradients, so pass more hosts than ranks; or pass two or more ranks, and traffic='pipeline'"
        )
    content = f"parameters and {traffic}" if job.sharded and traffic == "gradients" else traffic
    name = f"{content} of {type(module).__name__}, {job.replicas} x {job.ranks} hosts"
    if traffic == "pipeline":
        name += f", {job.order.name}, {pluralize(job.order.microbatches, 'microbatch')}"
    notes = list(job.recorded.partition.notes)
    if job.recorded.unused:
        notes.append(f"without gradients, since the forward does not use them: {', '.join(job.recorded.unused)}")
    if traffic == "gradients" and job.ranks > 1:
        notes.append("gradients between replicas alone: what the stages of a pipeline send each other is left out")
    return Workload(name, tuple(transfers), hosts, _element_bytes(job, traffic), after, tuple(notes))


def _tensor_workload(recorded: ModelRecord, name: str, hosts: int, microbatches: int, seconds: float) -> Workload:
    transfers = tensor.transfers(recorded.products, microbatches, seconds)
    if not transfers:
        raise ArgumentError("traffic='tensor': the forward multiplies by no layer's matrix, so that nothing is divided")
    name = f"tensor of {name}, {pluralize(hosts, 'host')}, {pluralize(microbatches, 'microbatch')}"
    element_bytes = min(parameter.element_size() for _, parameter in recorded.used)
    notes = (*recorded.partition.notes, *tensor.notes(recorded.products))
    return Workload(name, tuple(transfers), hosts, element_bytes, 0.0, notes)


def _check(hosts: int, ranks: int, traffic: Traffic, sharded: bool, compute: Compute) -> None:
    is_number = isinstance(compute, (int, float)) and not isinstance(compute, bool)
    if compute not in ("none", "measure") and not (is_number and 0 <= float(compute) < float("inf")):
        raise ArgumentError(f"compute={compute!r}: expected 'none', 'measure', or the seconds of a stage's forward")
    if traffic == "tensor" and (ranks != 1 or sharded or hosts < 2):
        raise ArgumentError(
            f"traffic='tensor' with hosts={hosts}, ranks={ranks}, sharded={sharded}: all hosts divide each layer, so "
            "pass 2 or more, and neither ranks nor sharded"
        )
    if traffic == "tensor" and compute == "measure":
        raise ArgumentError("traffic='tensor' cannot measure divided layers here: pass compute='none', or seconds")
    replicas = hosts // max(ranks, 1)
    if min(ranks, replicas) < 1 or ranks * replicas != hosts:
        raise ArgumentError(f"hosts={hosts}, ranks={ranks}, replicas={replicas}: hosts are ranks * replicas, both >= 1")
    if sharded and replicas == 1:
        raise ArgumentError("sharded=True divides parameters among replicas, of which there is one: pass more hosts")


def _check_dtype(dtype: torch.dtype | None, model: nn.Module, traffic: Traffic, sharded: bool) -> None:
    if check_grad_dtype(dtype) is None:
        return
    if traffic == "tensor":
        raise ArgumentError(f"grad_dtype={dtype}: traffic='tensor' sends no gradients of parameters; omit it")
    lifted = [name for name, p in model.named_parameters() if gradient_dtype(p, dtype) != gradient_dtype(p)]
    if sharded and lifted:
        raise ArgumentError(
            f"grad_dtype={dtype}: fully_shard, which sharded=True stands for, sums the gradient of {lifted[0]!r} "
            "itself; omit grad_dtype="
        )


def _element_bytes(job: Job, traffic: Traffic) -> int:
    """Return the size of the smallest number that is sent."""
    used = [parameter for _, parameter in job.recorded.used]
    sizes = [dtype.itemsize for dtype in group_by_gradient_dtype(used, job.gradient_dtype)]
    if job.sharded:
        sizes += [parameter.element_size() for parameter in used]
    if traffic == "pipeline":
        inputs = (i for stage in job.recorded.partition.stages for i in stage.meta.inputs)
        sizes += [pipeline.element_bytes(i.meta) for i in inputs if i.source != MODEL_INPUT]
    return min(sizes)
