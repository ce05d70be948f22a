"""Tries a loss before anything runs: on a synthetic output, with the target of a real microbatch.

The output's values are meaningless, so what the loss itself raises for them is said, but refuses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from penstock._base.compat import fake_mode, quiet
from penstock._base.errors import PenstockError
from penstock._base.formatting import one_line
from penstock._base.pytree import map_tensors
from penstock._base.stages import Output, needs_backward
from penstock.partition.record.fakes import Snapshot
from penstock.runtime.execute.executor import BoundSchedule
from penstock.runtime.loss.loss import no_gradient_error

MAX_OUTPUT_BYTES = 2**28
"""Larger outputs are made up without memory."""

_FILL_VALUE = 0.5
"""Valid as a probability, a logit and a distance, so few losses refuse it."""


def try_loss(bound: BoundSchedule, target: Any, loss: object) -> str | None:
    """Call the loss for the first microbatch. If the loss is a module, its changes to itself are undone.

    Args:
        bound: the bound schedule.
        target: the microbatch's target.
        loss: the user's loss.

    Returns:
        Why this loss could not be tried; None if it could.

    Raises:
        ArgumentError: it does not return a scalar that takes a gradient.
    """
    first, head = bound.partitions[0], bound.head
    metas = first.stages[-1].meta.outputs
    is_small = sum(prod(o.meta.shape) * _dtype(o).itemsize for o in metas) <= MAX_OUTPUT_BYTES
    mode = None if is_small else fake_mode()
    try:
        with torch.enable_grad(), _restoring_state(loss), mode or nullcontext(), quiet():
            loss_target = target if mode is None else map_tensors(mode.from_tensor, target)
            head.begin_step([loss_target], [1.0], keep_outputs=False)
            root = head(0, [_make_output(output, first.stages[-1].device) for output in metas])
    except PenstockError:
        raise
    except Exception as error:
        return f"the loss could not be tried on a made-up output ({one_line(error)})"
    finally:
        head.begin_step([], [], keep_outputs=False)
    if root is not None and not root.requires_grad and any(needs_backward(stage.meta) for stage in first.stages):
        raise no_gradient_error()
    return None


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
