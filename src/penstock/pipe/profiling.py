"""Measures what each part of a model costs on this device, or estimates it for another, for one microbatch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from penstock.balance import Profile, estimated, fitted, read_profile
from penstock.errors import ArgumentError
from penstock.hardware import Device, Efficiency
from penstock.hardware import device as known
from penstock.partition import NoStreams, Partitioner, UnmeasurableError, tensors_in
from penstock.partition.measure.costs import identity
from penstock.partition.units.chain import as_module
from penstock.pipe.build import checked_inputs
from penstock.runtime.batch.batch_dims import BatchDims, Dim
from penstock.runtime.batch.cutting import Cutting, SplitFunction
from penstock.runtime.processes.world import device_named
from penstock.trees import Flat, map_tensors, unflatten


def profile(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    microbatches: int | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    batch_dims: BatchDims | Dim = None,
    split: SplitFunction | None = None,
    leaves: Sequence[str] | None = None,
    opens: Sequence[str] | None = None,
    device: torch.device | Device | str | None = None,
    budget_seconds: float = 2.0,
    calibrate: Sequence[Profile | str | os.PathLike[str]] | Efficiency = (),
) -> Profile:
    """Runs each module before which the model can be cut, forward and backward, and says what it costs.

    Repeated blocks are run once for all. Inputs are made up, except integers. The loss function is not part of it,
    unless the model computes its own. Nothing of the model changes, nor any random generator.

    Args:
        model, args, kwargs, batch_dims, split, leaves, opens: as for `penstock.pipeline`.
        microbatches: how many the batch is cut into; the first one is measured. None: 8, or one per row of a smaller
            batch.
        microbatch_sizes: instead: the rows of each microbatch to measure, such as [1, 2, 4, 8]. The profile is that of
            the largest, with the others in `others`.
        device: where to run. None: where the example is. Or what to estimate for, without running: a
            `penstock.hardware.Device`, or the name of one ("h100"), or of a file that describes one ("mine.toml"); then
            weights may be on the meta device.
        budget_seconds: how long to measure each size; each kind of unit is run at least twice, whatever that takes.
        calibrate: profiles measured on devices of the kind that is estimated, of this or any other model, or their
            files: they say how much of its peaks such a device reaches. Or an `Efficiency` that says so.

    Raises:
        ArgumentError: an argument is wrong, the batch makes no microbatch of such a size, or the model cannot be run
            (its weights are on the meta device).
        PartitionError: the model cannot be recorded.
    """
    if isinstance(budget_seconds, bool) or not isinstance(budget_seconds, (int, float)) or not budget_seconds >= 0:
        raise ArgumentError(f"budget_seconds={budget_seconds!r}: expected seconds, 0 or more")
    if microbatches is not None and (not isinstance(microbatches, int) or microbatches < 1):
        raise ArgumentError(f"microbatches={microbatches!r}: expected a whole number, at least 1")
    example, cutting = checked_inputs(args, kwargs), Cutting.of(batch_dims, split)
    kind = specified(device)
    if kind is None and calibrate:
        raise ArgumentError(
            f"calibrate= is for estimates: name what to estimate for (device='h100'); device={device!r} is measured"
        )
    pieces = _pieces(cutting, example, microbatches, microbatch_sizes)
    partitioner = Partitioner(model, 1, leaves=leaves, opens=opens, streams=NoStreams())

    def measured(piece: Flat, rows: int) -> Profile:
        inputs, named = unflatten(piece.leaves, piece.structure)
        if kind is not None:
            return partitioner.profile(inputs, named, None, rows)
        if device is not None and not isinstance(device, Device):
            there = device_named(device)
            inputs, named = map_tensors(lambda tensor: tensor.to(there), (inputs, named))
        return partitioner.profile(inputs, named, budget_seconds, rows)

    try:
        with torch.enable_grad():
            *others, largest = [measured(piece, rows) for piece, rows in pieces]
    except UnmeasurableError as error:
        raise ArgumentError(f"the model cannot be profiled: {error}") from error
    found = largest.with_others(others)
    return found if kind is None else estimated(found, kind, _efficiency(calibrate, kind))


def specified(device: torch.device | Device | str | None) -> Device | None:
    """The device to estimate for; None if it is one of torch's, on which to run.

    Raises:
        ArgumentError: it is neither; names the known ones most like it.
    """
    if isinstance(device, Device) or not isinstance(device, str):
        return device if isinstance(device, Device) else None
    if not device.endswith(".toml"):
        try:
            torch.device(device)
        except RuntimeError:  # none of torch's
            pass
        else:
            return None
    return known(device)


def _efficiency(given: Sequence[Profile | str | os.PathLike[str]] | Efficiency, device: Device) -> Efficiency:
    if isinstance(given, Efficiency):
        return given
    each = [given] if isinstance(given, (Profile, str, os.PathLike)) else given
    return fitted([one if isinstance(one, Profile) else read_profile(one) for one in each], device)


def check_profile(
    found: Profile, model: nn.Module | Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any], what: str
) -> None:
    """Refuses a profile of another model than this one, or of another device or dtype. `what`: the profile's name.

    Raises:
        ArgumentError: names the first difference.
    """
    module = as_module(model)
    mine = identity(module)
    device = next(
        (tensor.device for tensor in (*tensors_in((args, kwargs)), *module.parameters())), torch.device("cpu")
    )
    found.check_for(mine.parameters, device.type, mine.dtype, what, ", or leave TARGET out to take it as it is")


def _pieces(
    cutting: Cutting, example: tuple[Any, Any], microbatches: int | None, sizes: Sequence[int] | None
) -> list[tuple[Flat, int]]:
    """The microbatches to measure and their rows, the largest last."""
    if sizes is None:
        count = microbatches or cutting.usual(*example)
        divided = cutting.divide(*example, None, count, "example", 1)
        cut = cutting.cut(*example, divided, count, "example", None, 1)
        return [(cut.pieces[0], cut.sizes[0])]
    given = f"microbatch_sizes={[*sizes]}"
    if microbatches is not None:
        raise ArgumentError(f"{given}: microbatches={microbatches} says the size too; leave one of them out")
    if not sizes or any(isinstance(rows, bool) or not isinstance(rows, int) or rows < 1 for rows in sizes):
        raise ArgumentError(f"{given}: expected numbers of rows, each at least 1")
    try:
        return [(cutting.of_rows(*example, rows).pieces[0], rows) for rows in sorted({*sizes})]
    except ArgumentError as error:
        raise ArgumentError(f"{given}: {error}") from None
