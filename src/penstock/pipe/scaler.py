"""Scaled losses for training in half precision: torch's GradScaler, the same on every rank of a pipeline.

Torch's own looks at one process: a rank that finds no infinity would step while another skips, and their scales would
diverge. Here all ranks look first, and then all step, or none does.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.pipe.pipeline import Pipeline


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a pipeline. Every rank makes one, and calls the same methods in the same order.

        scaler = penstock.GradScaler(pipe)
        with torch.autocast("cuda", dtype=torch.float16):
            pipe.step(x, target=y, loss_scale=scaler.get_scale())  # for scaler.scale(loss).backward(); / n for loss / n
        scaler.unscale_(optimizer)  # only where gradients are looked at, or clipped
        pipe.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()

    Its state, for checkpoints, is that of torch's.

    Args:
        pipe: the pipeline whose gradients are scaled.
        options: torch's own: `init_scale`, `growth_factor`, `backoff_factor`, `growth_interval`, `enabled`.
    """

    def __init__(self, pipe: Pipeline, **options: Any) -> None:
        if not isinstance(pipe, Pipeline):
            raise ArgumentError(
                f"pipe={pipe!r}: expected a pipeline, as penstock.pipeline returns it; the scaler uses its device"
            )
        super().__init__(pipe.device.type, **options)
        self._pipe = pipe
        self._found_inf: dict[int, bool] = {}
        self._stepped: set[int] = set()
        self._updated_at = pipe.step_count
        if self.is_enabled():
            super().scale(torch.zeros((), device=pipe.device))  # this is when torch makes the scale

    def scale(self, outputs: Any) -> Any:
        """Refused: a pipeline's step runs the backward itself. Pass `loss_scale=scaler.get_scale()` to it.

        Raises:
            ArgumentError: always, except for a scaler that is not enabled.
        """
        if not self.is_enabled():
            return outputs
        raise ArgumentError(
            "scaler.scale(loss): a pipeline's step runs the backward itself; pass "
            "pipe.step(..., loss_scale=scaler.get_scale()) and leave scale() and backward() out"
        )

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale, and find out whether all are finite, on all ranks.

        Raises:
            ArgumentError: the last step ran with another scale, or within `no_sync`; or a gradient is in float16.
            RuntimeError: a second call for an optimizer, before `update`.
        """
        if not self.is_enabled():
            return
        if id(optimizer) in self._found_inf:
            raise RuntimeError("unscale_() or step() was called already for this optimizer since the last update()")
        self._pipe.session.require_synced_gradients("GradScaler")
        scale, steps = self.get_scale(), max(self._pipe.step_count - self._updated_at, 1)
        if not any(math.isclose(self._pipe.loss_scale * count, scale) for count in range(1, steps + 1)):
            raise ArgumentError(
                f"the last step ran with loss_scale={self._pipe.loss_scale:g}, but the scaler's is {scale:g}; "
                "call pipe.step(..., loss_scale=scaler.get_scale()), divided by the number of steps if their losses "
                "are averaged"
            )
        super().unscale_(optimizer)
        self._pipe.session.accept_gradients()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients, for torch's `unscale_`: with one result for all ranks, which torch's `update` uses."""
        any_inf = self._found_inf[id(optimizer)] = not all(
            self._pipe.all_gather_object(_unscale(optimizer, float(inv_scale)))
        )
        return {found_inf.device: found_inf.fill_(any_inf)}

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step(...)`, unless a gradient of some rank is not finite: then no rank takes the step.

        Raises:
            ArgumentError: a closure was given; or as for `unscale_`, which it calls if that was not done.
            RuntimeError: a second call for an optimizer, before `update`.
        """
        if self.is_enabled():
            if args or "closure" in kwargs:
                raise ArgumentError(
                    "scaler.step(optimizer) was given a closure, which cannot be run again: leave it out"
                )
            if id(optimizer) in self._stepped:
                raise RuntimeError("step() was called already for this optimizer since the last update()")
            if id(optimizer) not in self._found_inf:
                self.unscale_(optimizer)
            self._stepped.add(id(optimizer))
            if self._found_inf[id(optimizer)]:
                return None
        value: float | None = optimizer.step(*args, **kwargs)
        return value

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lower the scale if a step was skipped, and raise it after exactly `growth_interval` steps without a skip.

        Raises:
            RuntimeError: there was neither `unscale_` nor `step` since the last call.
        """
        if self.is_enabled() and new_scale is None and not self._found_inf:
            raise RuntimeError("update() was called without step() or unscale_() before it")
        super().update(new_scale)
        self._found_inf.clear()
        self._stepped.clear()
        self._updated_at = self._pipe.step_count


def _unscale(optimizer: torch.optim.Optimizer, factor: float) -> bool:
    """Multiply an optimizer's gradients. Return whether all were finite. (Torch's own takes no list of tensors of which
    some are sharded.)"""
    finite: list[Tensor] = []
    with torch.no_grad():
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.dtype is torch.float16:
                    raise ArgumentError(
                        f"a parameter of shape {list(parameter.shape)} is in float16, and so is its gradient, which "
                        "cannot be divided by the scale without loss; keep parameters in float32 and use torch.autocast"
                    )
                if parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.coalesce()
                parameter.grad.mul_(factor)
                values = parameter.grad.values() if parameter.grad.is_sparse else parameter.grad
                if values.numel():
                    finite.append(torch.linalg.vector_norm(values, torch.inf).isfinite())
    return bool(torch.stack([flag.to(finite[0].device) for flag in finite]).all()) if finite else True
