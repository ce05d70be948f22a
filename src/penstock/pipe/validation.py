"""What every verb of the facade takes: a model and a batch, checked and shared; and the device that they are on. One
process has the example batch; the others may give its shapes, or nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import is_accelerator
from penstock._base.errors import ArgumentError
from penstock._base.formatting import a
from penstock.partition.given_model import as_module
from penstock.runtime.batch.batch_dims import Microbatches, iter_leaves
from penstock.runtime.batch.cut import Example
from penstock.runtime.batch.outline import Outline
from penstock.runtime.execute.control import Control
from penstock.runtime.gradients.sharding import parallelized_by


def default_device(model: nn.Module | Sequence[nn.Module], example: Example) -> torch.device:
    """Return the default device of the run: the accelerator that holds the model or else the example."""
    device = next((p.device for p in as_module(model).parameters()), torch.device("cpu"))
    if is_accelerator(device):
        return device
    return next((t.device for t in batch_tensors(example) if is_accelerator(t.device)), device)


def has_values(example: Example) -> bool:
    """Whether a process has the example itself, rather than its shapes (tensors on the meta device) or nothing."""
    tensors = batch_tensors(example)
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def batch_tensors(example: Example) -> list[Tensor]:
    """Return the tensors of a batch, those in `Microbatches` included."""
    return [leaf for _, leaf in iter_leaves(example) if isinstance(leaf, Tensor)]


def share_example(control: Control, example: Example) -> Example:
    """Return the example, from the first process that has one if this one has none. Every process calls it.

    Raises:
        ArgumentError: no process has one.
    """
    present = control.gather(has_values(example), "its example")
    if all(present):
        return example
    if not any(present):
        if batch_tensors(example):
            raise ArgumentError(
                "the example is on the meta device on every rank that gives one: at least the rank of the first stage "
                "has to give real tensors, since the forward may branch on the values of integers"
            )
        return example  # it has no tensors: a function of the user's makes them
    first = present.index(True)
    outlines = control.gather(Outline.of_example(example) if control.world.number == first else None, "its example")
    if has_values(example):
        return example
    filled: list[Example] = outlines[first].fill()
    return filled[0]


def check_not_parallelized(model: nn.Module) -> None:
    """Raise ArgumentError if the model, or one of its layers, was parallelized before."""
    if by := parallelized_by(model, "torch.distributed.fsdp", "torch.distributed._composable"):
        raise ArgumentError(
            f"model: fully_shard or replicate was applied before the pipeline was made ({by}); pass the plain model, "
            "and shard its stages with parallelize=lambda stage: fully_shard(stage, mesh=mesh['dp']); replicas need "
            "neither, as the pipeline averages gradients over mesh['dp']"
        )


def validate_inputs(args: Any, kwargs: Any) -> Example:
    """Return one batch, from the user's arguments.

    Raises:
        ArgumentError: they are not a sequence and a mapping, or a name is one that `Pipeline.step` takes itself.
    """
    if isinstance(args, (Tensor, Microbatches)):
        kind = "a tensor" if isinstance(args, Tensor) else "a Microbatches"
        raise ArgumentError(f"args is {kind}; expected a tuple of the model's positional inputs: pass (x,)")
    if isinstance(args, (Mapping, str)) or not isinstance(args, Iterable):
        raise ArgumentError(
            f"args is {a(type(args).__name__)}; expected a tuple of the model's positional inputs, such as (x,); what "
            "it takes by keyword is given as kwargs={'x': x}"
        )
    if not (kwargs is None or isinstance(kwargs, Mapping)):
        raise ArgumentError(
            f"kwargs is {a(type(kwargs).__name__)}; expected the model's inputs by keyword, {{'x': x}}; what the loss "
            "takes is given as target=..., the loss as loss_fn=..."
        )
    reserved = sorted({"target", "outputs", "timeline", "loss_scale"} & (kwargs or {}).keys())
    if reserved:
        raise ArgumentError(
            f"kwargs: the model's argument {reserved[0]!r} has the name of one that Pipeline.step takes itself; "
            "pass it by position in args, or wrap the model in a module that names it otherwise"
        )
    return tuple(args), dict(kwargs or {})
