"""Clips gradients by one norm over all ranks, with the arguments of `torch.nn.utils.clip_grad_norm_`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.runtime.gradients.distribution import local, on_host, whole


def clip(
    held: Mapping[str, Tensor],
    order: Sequence[str],
    gather: Callable[[dict[str, Tensor]], list[Any]],
    *,
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> Tensor:
    """Scales this process's gradients; returns the norm of all. Every rank calls it.

    Args:
        held: the gradients, by their parameters' names.
        order: the names of all parameters, in the order in which norms are added.
        gather: gives each process's object to all.
        max_norm, norm_type, error_if_nonfinite: see `Pipeline.clip_grad_norm_`.
    """
    if not isinstance(error_if_nonfinite, bool):
        raise ArgumentError(f"error_if_nonfinite={error_if_nonfinite!r}: expected True or False")
    max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
    mine = on_host([whole(torch.linalg.vector_norm(grad, norm_type)) for grad in held.values()])
    norms = {name: norm for part in gather(dict(zip(held, mine, strict=True))) for name, norm in part.items()}
    ordered = [norms[name] for name in order if name in norms]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type:g} is non-finite ({float(total):g}), so it cannot be "
            "clipped; pass error_if_nonfinite=False to scale by it anyway, or check_finite=True to "
            "penstock.pipeline to find where it begins"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in held.values():
        local(grad).mul_(factor)  # a scalar on the CPU goes along with the call; a copy would wait for the device
    return total


def _number(name: str, value: Any) -> float:
    """A number, also in a tensor, or "inf", as torch takes it."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not number >= 0:
        raise ArgumentError(
            f"{name}={value!r}: expected a number of at least 0; the parameters are the pipeline's, and are not passed"
        )
    return number
