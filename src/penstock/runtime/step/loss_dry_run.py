"""Tries a loss before anything runs: on a synthetic output, with the target of a real microbatch.

The output's values are meaningless, so an error counts only if it does not depend on them: that is, if fake tensors,
which have no values, raise it too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import FakeTensorMode, fake_mode, quiet
from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.formatting import one_line
from penstock._base.pytree import map_tensors
from penstock._base.stages import Output, needs_backward
from penstock.partition.record.fakes import Snapshot
from penstock.runtime.execute.engine import BoundSchedule
from penstock.runtime.loss.loss import no_gradient_error

MAX_OUTPUT_BYTES = 2**28
"""No real output of more bytes is made up."""

_COMPARED_CHARACTERS = 20
"""How many characters of a message are compared."""

_FILL_VALUE = 0.5
"""Valid as a probability, a logit and a distance, so few losses refuse it."""


def try_loss(bound: BoundSchedule, target: Any, loss: object) -> str | None:
    """Call the loss for the first microbatch. If the loss is a module, its changes to itself are undone.

    Args:
        bound: the bound schedule.
        target: the microbatch's target.
        loss: the user's loss.

    Returns:
        Why this loss cannot be checked; None if it is fine.

    Raises:
        ArgumentError: it raises whatever the values are, or does not return a scalar that takes a gradient.
    """
    metas = bound.partitions[0].stages[-1].meta.outputs
    is_small = sum(prod(o.meta.shape) * _dtype(o).itemsize for o in metas) <= MAX_OUTPUT_BYTES
    real_error = None if not is_small else _call_loss(bound, metas, target, loss, None)
    if is_small and real_error is None:
        return None
    fake_error = _call_loss(bound, metas, target, loss, fake_mode())
    if fake_error is None:
        return None
    if real_error is not None and _same_error(real_error, fake_error) and not bound.partitions[0].leaves_here:
        raise ArgumentError(
            f"the loss raised {one_line(real_error)}: check that loss_fn fits the model's output and the given target"
        ) from real_error
    return f"the loss could not be tried without real values ({one_line(fake_error)})"


def _call_loss(
    bound: BoundSchedule, metas: Sequence[Output], target: Any, loss: object, mode: FakeTensorMode | None
) -> Exception | None:
    """Return the error that the loss raised. Raise ArgumentError if its result is wrong."""
    head = bound.head
    try:
        with torch.enable_grad(), _restoring_state(loss), nullcontext() if mode is None else mode, quiet():
            loss_target = target if mode is None else map_tensors(mode.from_tensor, target)
            head.start([loss_target], [1.0], keep_outputs=False)
            root = head(0, [_make_output(output, bound.partitions[0].stages[-1].device) for output in metas])
    except PenstockError:
        raise
    except Exception as error:
        return error
    finally:
        head.start([], [], keep_outputs=False)
    trains = any(needs_backward(stage.meta) for stage in bound.partitions[0].stages)
    if root is not None and not root.requires_grad and trains:
        raise no_gradient_error()
    return None


def _same_error(first: Exception, second: Exception) -> bool:
    """Whether two errors are the same. Fake tensors sometimes raise another type with the same words."""
    return type(first) is type(second) or str(first)[:_COMPARED_CHARACTERS] == str(second)[:_COMPARED_CHARACTERS] != ""


def _make_output(output: Output, device: torch.device) -> Tensor:
    dtype = _dtype(output)
    shape, stride = output.meta.shape, output.meta.stride
    repeats = any(step == 0 and size > 1 for size, step in zip(shape, stride, strict=True))
    if repeats:
        tensor = torch.empty(shape, dtype=dtype, device=device)
    else:
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    tensor.fill_(_FILL_VALUE if dtype.is_floating_point or dtype.is_complex else 0)
    return tensor.requires_grad_(output.meta.requires_grad)


def _dtype(output: Output) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, output.meta.dtype)
    return dtype


@contextmanager
def _restoring_state(loss: object) -> Iterator[None]:
    """Restore the state of a loss that is a module: its attributes, and the values of its buffers."""
    module = loss if isinstance(loss, nn.Module) else nn.Module()
    snapshot, buffers = Snapshot(module), [(buffer, buffer.detach().clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        snapshot.restore()
        with torch.no_grad():
            for buffer, values in buffers:
                buffer.copy_(values)
