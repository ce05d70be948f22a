"""What an optimizer of each rank gets: parameter groups by the unsplit model's names, and gradients clipped by one norm
over all ranks, with a warning where something else may have clipped them.

Groups are the same, in one order, on every rank. If they depended on what a rank holds, their number would differ,
which neither a scheduler's list of rates nor a checkpoint allows; and an optimizer without any group raises.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from penstock._base.errors import ArgumentError, check_flags, warn
from penstock.runtime.gradients.dtensors import gather_full, local

OptionsOf = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
"""The optimizer's options for a parameter (`{"lr": 1e-4}`), by its name; None leaves it out."""


def parameter_groups(
    all_parameters: Iterable[tuple[str, nn.Parameter]],
    local_parameters: Iterable[tuple[str, nn.Parameter]],
    options_of: OptionsOf,
) -> list[dict[str, Any]]:
    """Return one group for each kind of options, in the order in which the unsplit model's parameters first have them.

    Args:
        all_parameters: those of the unsplit model; those of other ranks have only their shapes, not their values.
        local_parameters: this process's, by the same names.

    Raises:
        ArgumentError: the options are not a dict, or hold parameters.
    """
    if not callable(options_of):
        raise ArgumentError(
            f"parameter_groups({options_of!r}): expected a function of a parameter's name and the parameter that "
            "returns a dict of the optimizer's options, or None to leave the parameter out"
        )
    local_by_name = dict(local_parameters)
    groups: list[dict[str, Any]] = []
    distinct_options: list[dict[str, Any]] = []
    for name, parameter in all_parameters:
        options = options_of(name, parameter) if parameter.requires_grad else None
        if options is None:
            continue
        if not isinstance(options, Mapping) or "params" in options:
            raise ArgumentError(
                f"the options of parameter {name!r} are {options!r}; expected a dict of the optimizer's options, "
                "without 'params', such as {'weight_decay': 0.0}, or None to leave the parameter out"
            )
        if dict(options) not in distinct_options:
            distinct_options.append(dict(options))
            groups.append({"params": [], **options})
        if name in local_by_name:
            groups[distinct_options.index(dict(options))]["params"].append(local_by_name[name])
    return groups


def clip(
    grads: Mapping[str, Tensor],
    order: Sequence[str],
    gather: Callable[[dict[str, Tensor]], list[Any]],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale this process's gradients; return the norm of all. Every rank calls it.

    Args:
        grads: the gradients, by their parameters' names.
        order: the names of all parameters, in the order in which norms are added.
        gather: gives each process's object to all.
        max_norm, norm_type, error_if_nonfinite: see `Pipeline.clip_grad_norm_`.
    """
    check_flags(error_if_nonfinite=error_if_nonfinite)
    max_norm, norm_type = _number("max_norm", max_norm), _number("norm_type", norm_type)
    local_norms = _on_host([gather_full(torch.linalg.vector_norm(grad, norm_type)) for grad in grads.values()])
    norms = {name: norm for part in gather(dict(zip(grads, local_norms, strict=True))) for name, norm in part.items()}
    ordered = [norms[name] for name in order if name in norms]
    total = torch.linalg.vector_norm(torch.stack(ordered), norm_type) if ordered else torch.zeros(())
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the total norm of order {norm_type:g} is non-finite ({float(total):g}), so it cannot be "
            "clipped; pass error_if_nonfinite=False to scale by it anyway, or check_finite=True to "
            "penstock.pipeline to find where it begins"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for grad in grads.values():
        local(grad).mul_(factor)  # a scalar on the CPU goes along with the call; a copy would wait for the device
    return total


class LocalClippingCheck:
    """Warn once if gradients change in place between a step and an optimizer's, as in a loop that calls
    `torch.nn.utils.clip_grad_norm_` (nanoGPT's train.py, timm's): it takes the norm of one rank's stages.

    A gradient carries the version at which Penstock wrote it last, so that two pipelines may share modules.

    Args:
        parameters: gives this process's parameters by name.
    """

    _VERSION = "_penstock_version"

    def __init__(self, parameters: Callable[[], Iterable[tuple[str, nn.Parameter]]]) -> None:
        self._parameters = parameters
        self._has_warned = False
        self.close = register_optimizer_step_pre_hook(self._check).remove

    def accept(self) -> None:
        """Take the gradients as they are: Penstock has just written them."""
        for _, parameter in self._parameters():
            if parameter.grad is not None:
                setattr(parameter.grad, self._VERSION, parameter.grad._version)

    def _check(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        changed = [grad for grad in grads if vars(grad).pop(self._VERSION, grad._version) != grad._version]
        if changed and not self._has_warned:
            self._has_warned = True
            warn(
                "gradients were changed between pipe.step() and optimizer.step(): if torch.nn.utils.clip_grad_norm_ "
                "did it, each rank clips by the norm of its own stages; call pipe.clip_grad_norm_(max_norm) instead. "
                "What changes a gradient by its own values alone (clip_grad_value_, a division) is right"
            )


def _number(name: str, value: Any) -> float:
    """Return a number, also from a tensor, or "inf", as torch takes it."""
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, RuntimeError):
        number = math.nan
    if not number >= 0:
        raise ArgumentError(
            f"{name}={value!r}: expected a number of at least 0; the parameters are the pipeline's, and are not passed"
        )
    return number


def _on_host(numbers: Sequence[Tensor]) -> list[Tensor]:
    """Bring scalars to the CPU: those of one device and dtype travel together, so that the host waits once."""
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, number in enumerate(numbers):
        groups.setdefault((number.device, number.dtype), []).append(index)
    results = list(numbers)
    for indices in groups.values():
        for index, number in zip(indices, torch.stack([numbers[index] for index in indices]).cpu(), strict=True):
            results[index] = number.clone()  # a view would travel with all the others
    return results
