"""Scaled losses for training in half precision: torch's GradScaler, the same on every rank of a pipeline.

Torch's own looks at one process: a rank that finds no infinity would step while another skips, and their scales would
diverge. Here all ranks look first, and then all step, or none does.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.pipe.pipeline import Pipeline


class GradScaler(torch.amp.GradScaler):
    """A `torch.amp.GradScaler` for a pipeline. Every rank makes one, and calls the same methods in the same order.

        scaler = penstock.GradScaler(pipe)
        with torch.autocast("cuda", dtype=torch.float16):
            pipe.step(x, target=y, loss_scale=scaler.get_scale())  # where a loop says scaler.scale(loss).backward()
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
        self._found: dict[int, bool] = {}
        self._stepped: set[int] = set()
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
        """Divides the gradients by the scale, and finds out whether all are finite, on all ranks.

        Raises:
            ArgumentError: the last step ran with another scale, or within `no_sync`; or a gradient is in float16.
            RuntimeError: a second call for an optimizer, before `update`.
        """
        if not self.is_enabled():
            return
        if id(optimizer) in self._found:
            raise RuntimeError("unscale_() or step() was called already for this optimizer since the last update()")
        self._pipe.session.refuse_unaveraged("GradScaler")
        scale = self.get_scale()
        if self._pipe.loss_scale != scale:
            raise ArgumentError(
                f"the last step ran with loss_scale={self._pipe.loss_scale:g}, but the scaler's is {scale:g}; "
                "call pipe.step(..., loss_scale=scaler.get_scale())"
            )
        finite = _unscale(optimizer, scale)
        self._found[id(optimizer)] = not all(self._pipe.gather(finite))

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """`optimizer.step(...)`, unless a gradient of some rank is not finite: then no rank takes the step.

        Raises:
            ArgumentError: a closure was given; or as for `unscale_`, which it calls if that was not done.
            RuntimeError: a second call for an optimizer, before `update`.
        """
        if self.is_enabled() and not self._may_step(optimizer, closure=bool(args) or "closure" in kwargs):
            return None
        value: float | None = optimizer.step(*args, **kwargs)
        return value

    def _may_step(self, optimizer: torch.optim.Optimizer, *, closure: bool) -> bool:
        if closure:
            raise ArgumentError("scaler.step(optimizer) was given a closure, which cannot be run again: leave it out")
        if id(optimizer) in self._stepped:
            raise RuntimeError("step() was called already for this optimizer since the last update()")
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        self._stepped.add(id(optimizer))
        return not self._found[id(optimizer)]

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Lowers the scale if a step was skipped, and raises it after `growth_interval` steps without a skip.

        Raises:
            RuntimeError: there was neither `unscale_` nor `step` since the last call.
        """
        if not self.is_enabled():
            return
        if new_scale is not None:
            super().update(new_scale)
        elif not self._found:
            raise RuntimeError("update() was called without step() or unscale_() before it")
        else:
            self.load_state_dict(_next(self.state_dict(), found=any(self._found.values())))
        self._found.clear()
        self._stepped.clear()


def _next(state: dict[str, Any], *, found: bool) -> dict[str, Any]:
    """The state after a step: torch's rule."""
    if found:
        return state | {"scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
    successes = state["_growth_tracker"] + 1
    if successes < state["growth_interval"]:
        return state | {"_growth_tracker": successes}
    grown = torch.tensor(state["scale"] * state["growth_factor"], dtype=torch.float32)
    return state | {"scale": float(grown) if grown.isfinite() else state["scale"], "_growth_tracker": 0}


def _unscale(optimizer: torch.optim.Optimizer, scale: float) -> bool:
    """Divides an optimizer's gradients by the scale. Returns whether all were finite."""
    factor = float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())
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
