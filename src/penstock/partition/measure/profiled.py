"""The profile of a recording: times, what units take of memory, and the operations that estimates need."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from penstock.balance import Profile
from penstock.partition.cut.balance import candidates
from penstock.partition.measure.held import count, units_held, with_memory
from penstock.partition.measure.measuring import measure
from penstock.partition.measure.running import Splits
from penstock.partition.recording.recording import Recording


def profiled(
    recording: Recording,
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    budget_seconds: float | None,
    rows: int,
    splits: Splits | None,
) -> Profile:
    """What each unit of a recording costs. Arguments and errors are those of `Partitioner.profile`."""
    units = candidates(recording, model, "flops") or candidates(recording, model, "flops", 2)
    if budget_seconds is None:
        return replace(count(recording, model, units, args, kwargs), rows=rows)
    _, held, unknown = units_held(recording, model, units, counts=True)
    found = measure(recording, model, units, args, kwargs, budget_seconds, splits, memory=True)
    return replace(found, rows=rows, units=with_memory(found.units, held, counted=not unknown))
