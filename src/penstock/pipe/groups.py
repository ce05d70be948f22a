"""Parameter groups of an optimizer by the unsplit model's names: the same groups, in one order, on every rank.

If groups depended on what a rank holds, their number would differ, which neither a scheduler's list of rates nor a
checkpoint allows; and an optimizer without any group raises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from penstock._base.errors import ArgumentError

OptionsOf = Callable[[str, nn.Parameter], Mapping[str, Any] | None]
"""The optimizer's options for a parameter (`{"lr": 1e-4}`), by its name; None leaves it out."""


def parameter_groups(
    every: Iterable[tuple[str, nn.Parameter]], held: Iterable[tuple[str, nn.Parameter]], options_of: OptionsOf
) -> list[dict[str, Any]]:
    """One group for each kind of options, in the order in which the unsplit model's parameters first have them.

    Args:
        every: parameters of the unsplit model; those of other ranks have only their shapes, not their values.
        held: this process's parameters, by the same names.

    Raises:
        ArgumentError: the options are not a dict, or hold parameters.
    """
    here = dict(held)
    groups: list[dict[str, Any]] = []
    kinds: list[dict[str, Any]] = []
    for name, parameter in every:
        options = options_of(name, parameter) if parameter.requires_grad else None
        if options is None:
            continue
        if not isinstance(options, Mapping) or "params" in options:
            raise ArgumentError(
                f"the options of parameter {name!r} are {options!r}; expected a dict of the optimizer's options, "
                "without 'params', such as {'weight_decay': 0.0}, or None to leave the parameter out"
            )
        if dict(options) not in kinds:
            kinds.append(dict(options))
            groups.append({"params": [], **options})
        if name in here:
            groups[kinds.index(dict(options))]["params"].append(here[name])
    return groups
