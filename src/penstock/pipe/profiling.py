"""Measures what each part of a model costs on this device, or estimates it for another, for one microbatch."""

from __future__ import annotations

import math
import os
import statistics
import timeit
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock._base.aliases import accept_aliases
from penstock._base.errors import ArgumentError, check_counts, check_seconds, is_integer
from penstock._base.pytree import Flat, map_tensors, unflatten
from penstock.costs import OPTIMIZER_VALUES, ModelFingerprint, Profile, estimate, fit_efficiency, read_profile
from penstock.costs.hardware import DeviceSpec, Efficiency
from penstock.costs.hardware import device as device_by_name
from penstock.distributed.world import World, join, resolve_device
from penstock.partition import NoStreams, Partitioner, UnmeasurableError, tensors_in
from penstock.partition.given_model import as_module
from penstock.partition.measure.clock import measure_undisturbed
from penstock.partition.measure.pieces import compute_fingerprint
from penstock.partition.record.fakes import untouched_generators
from penstock.pipe.build import build
from penstock.pipe.links import measure_links
from penstock.pipe.options import Options, validate_inputs
from penstock.runtime.batch.batch_dims import BatchDims, Dim
from penstock.runtime.batch.cut import Cutting, Example, SplitFunction
from penstock.runtime.batch.example import default_count, take_rows
from penstock.runtime.batch.outline import Outline, SingleRowError, explaining_cut
from penstock.runtime.execute.control import Control
from penstock.runtime.split_backward.backward import SplitBackward
from penstock.schedule import generate

DEFAULT_MESSAGE_BYTES = 2**20
"""The size of messages by which links are measured, for a model that cannot be cut."""

STAGES = 4
FEW_MICROBATCHES, MANY_MICROBATCHES = 2, 10
"""Numbers of microbatches: a longer step differs only in its number of actions."""

STEPS = 10

ON_CPU: Mapping[str, Any] = {"device": "cpu", "dtype": torch.float32}
"""For tensors on the CPU, whatever the defaults are."""

FEWER_VALUES, MORE_VALUES = 2**21, 2**22
"""Sizes of a parameter that AdamW updates on a CPU: a longer step differs only in its number of values."""

ACCELERATOR_FACTOR = 8
"""The sizes are multiplied by this on an accelerator: 64 and 128 MB of parameters, more than its caches hold."""


@accept_aliases(leaves="leaf_modules", opens="split_inside", split="split_fn")
def profile(
    model: nn.Module | Sequence[nn.Module],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    microbatches: int | None = None,
    microbatch_sizes: Sequence[int] | None = None,
    batch_dims: BatchDims | Dim = None,
    split_fn: SplitFunction | None = None,
    leaf_modules: Sequence[str] | None = None,
    split_inside: Sequence[str] | None = None,
    device: torch.device | DeviceSpec | str | None = None,
    budget_seconds: float = 2.0,
    calibrate: Sequence[Profile | str | os.PathLike[str]] | Efficiency = (),
    links: bool = False,
    target: Any = None,
) -> Profile:
    """Run each module before which the model can be cut, forward and backward, and say what it costs.

    Repeated blocks are run once for all. Inputs are made up, except integers. The loss function is not part of it,
    unless the model computes its own. Nothing of the model changes, nor any random generator.

    Args:
        model, args, kwargs, batch_dims, split_fn, leaf_modules, split_inside: as for `penstock.pipeline`.
        microbatches: how many the batch is cut into; the first one is measured. None: 8, or one per row of a smaller
            batch.
        microbatch_sizes: instead: the rows of each microbatch to measure, such as [1, 2, 4, 8]. The profile is that of
            the largest, with the others in `others`.
        device: where to run. None: where the example is. Or what to estimate for, without running: a
            `penstock.costs.hardware.DeviceSpec`, or the name of one ("h100"), or of a file that describes one
            ("mine.toml"); then weights may be on the meta device.
        budget_seconds: how long to measure each size; each kind of unit is run at least twice, whatever that takes.
        calibrate: profiles measured on devices of the kind that is estimated, of this or any other model, or their
            files: they say how much of its peaks such a device reaches. Or an `Efficiency` that says so.
        links: whether to measure latency and bandwidth between neighboring ranks too, with messages as large as the
            model's. Every rank of a job calls this. All measure the units at the same time, as they will work, since a
            machine's devices may slow each other down; all get rank 0's profile.
        target: of the whole batch, for the loss: only its memory counts.

    Raises:
        ArgumentError: an argument is wrong, `links` is asked for in a single process, the batch makes no microbatch of
            such a size, or the model cannot be run (its weights are on the meta device).
        PartitionError: the model cannot be recorded.
    """
    check_seconds(budget_seconds=budget_seconds, limit=math.inf)
    check_counts(required=False, microbatches=microbatches)
    example, cutting, spec = (validate_inputs(args, kwargs), Cutting.of(batch_dims, split_fn), find_device_spec(device))
    if spec is None and calibrate:
        raise ArgumentError(
            f"calibrate= is for estimates: name what to estimate for (device='h100'); device={device!r} is measured"
        )
    if spec is not None and links:
        raise ArgumentError("links are measured between the ranks that run here: leave them out of an estimate")
    pieces = _pieces(cutting, example, microbatches, microbatch_sizes)
    run_on = None if device is None or isinstance(device, DeviceSpec) or spec is not None else torch.device(device)
    per_row = sum(tensor.nbytes for tensor in tensors_in(target)) / _pieces(cutting, example, 1, None)[0][1]
    try:
        torch.empty(0, device=run_on)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).partition("\n")[0].partition(". ")[0]
        raise ArgumentError(f"device={device!r}: torch cannot compute there: {reason}; pass one that is here") from None
    partitioner = Partitioner(model, 1, leaves=leaf_modules, opens=split_inside, streams=NoStreams())
    splits = partial(SplitBackward, in_order=True)

    def profile_size(piece: Flat, rows: int, budget: float | None) -> Profile:
        positional, keyword = unflatten(piece.leaves, piece.structure)
        if run_on is not None:
            positional, keyword = map_tensors(lambda tensor: tensor.to(run_on), (positional, keyword))
        with explaining_cut(Outline.of_example((positional, keyword), sizes=(rows,))):
            result = partitioner.profile(positional, keyword, budget, splits)
        *leading, last = result.units
        return replace(result, rows=rows, units=(*leading, replace(last, target_bytes=rows * per_row)))

    def profile_all(budget: float | None) -> Profile:
        nonlocal cutting, pieces
        try:
            with torch.enable_grad():
                *smaller, largest = [profile_size(*piece, budget) for piece in pieces]
        except SingleRowError:
            if cutting.inputs.min_rows > 1:
                raise
            cutting = cutting.in_pairs()
            pieces = _pieces(cutting, example, microbatches, microbatch_sizes)
            return profile_all(budget)
        except UnmeasurableError as error:
            raise ArgumentError(f"the model cannot be profiled: {error}") from error
        return largest.with_others(smaller)

    def measure() -> Profile:
        result = profile_all(budget_seconds)
        result = replace(result, optimizer_byte_seconds=optimizer_byte_seconds(run_on or torch.device(result.device)))
        # other devices compute while the runtime goes on
        return replace(result, action_seconds=action_seconds()) if result.device == "cpu" else result

    if spec is not None:
        return estimate(profile_all(None), spec, _efficiency(calibrate, spec))
    measured_on = run_on or input_device(example, model)
    # ranks that measure their links do so all at once, so none decides by itself to do it again
    return _with_links(measure, measured_on) if links else measure_undisturbed(measure, measured_on)


def find_device_spec(device: torch.device | DeviceSpec | str | None) -> DeviceSpec | None:
    """Return the device to estimate for; None if it is one of torch's, on which to run.

    Raises:
        ArgumentError: it is neither; names the known ones most like it.
    """
    if not isinstance(device, str):
        return device if isinstance(device, DeviceSpec) else None
    if not device.endswith(".toml"):
        with suppress(RuntimeError):  # it is none of torch's
            torch.device(device)
            return None
    return device_by_name(device)


def _efficiency(source: Sequence[Profile | str | os.PathLike[str]] | Efficiency, device: DeviceSpec) -> Efficiency:
    if isinstance(source, Efficiency):
        return source
    profiles = [source] if isinstance(source, (Profile, str, os.PathLike)) else source
    return fit_efficiency([p if isinstance(p, Profile) else read_profile(p) for p in profiles], device)


def _with_links(units: Callable[[], Profile], device: torch.device) -> Profile:
    """Return the profile that rank 0 makes while all others do the same, with the links between all ranks."""
    world = join(None, None, device.type)
    if world.rank is None:
        raise ArgumentError(
            "links are measured between ranks, but this is a single process; start several: `penstock run --ranks 2 -m "
            "penstock profile ... --links`, or the same under torchrun"
        )
    local_device = resolve_device(device.type, world, world.rank, device)
    if local_device.type == "cuda":
        torch.cuda.set_device(local_device)
    control = Control(world, local_device)
    try:
        with control.reporting(close=control.close):
            with control.agreed(), control.working("the measuring of units"):
                local_profile = units()
            shared_profile = control.share(local_profile, role="everyone")
            sizes = [unit.boundary_bytes for unit in shared_profile.units if unit.boundary_bytes]
            size = statistics.median_high(sizes) if sizes else DEFAULT_MESSAGE_BYTES
            return replace(shared_profile, links=measure_links(control, local_device, size))
    finally:
        control.close()


def input_device(example: Any, model: nn.Module | Sequence[nn.Module]) -> torch.device:
    """Return where an example is; if it has no tensors, where the model is."""
    tensors = (*tensors_in(example), *as_module(model).parameters())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def fingerprint_for(
    model: nn.Module | Sequence[nn.Module], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> ModelFingerprint:
    """Return the fingerprint for a profile of this model with such inputs."""
    module = as_module(model)
    return compute_fingerprint(module, input_device((args, kwargs), module).type)


def _pieces(
    cutting: Cutting, example: Example, microbatches: int | None, sizes: Sequence[int] | None
) -> list[tuple[Flat, int]]:
    """Return the microbatches to measure and their rows, the largest last."""
    if sizes is None:
        count = microbatches or default_count(cutting, example)
        cut = cutting.into(count).cut_example(example)
        return [(cut.pieces[0], cut.sizes[0])]
    argument = f"microbatch_sizes={[*sizes]}"
    if microbatches is not None:
        raise ArgumentError(f"{argument}: microbatches={microbatches} says the size too; leave one of them out")
    if not sizes or not all(is_integer(rows) and rows >= 1 for rows in sizes):
        raise ArgumentError(f"{argument}: expected numbers of rows, each >= 1")
    try:
        return [(take_rows(cutting, example, rows), rows) for rows in sorted({*sizes})]
    except ArgumentError as error:
        raise ArgumentError(f"{argument}: {error}") from None


def action_seconds() -> float:
    """Measure the runtime's own time for one action on a CPU, with a pipeline that has nothing to do in this process.

    It is the least of several: what else runs here only adds to it. Draws nothing from random generators.
    """
    with torch.enable_grad(), torch.autocast("cpu", enabled=False), untouched_generators():
        extra_actions = (MANY_MICROBATCHES - FEW_MICROBATCHES) * STAGES
        pipeline_seconds = (_step_seconds(MANY_MICROBATCHES) - _step_seconds(FEW_MICROBATCHES)) / extra_actions
        layer, x = nn.Linear(8, 8, **ON_CPU), torch.zeros(1, 8, **ON_CPU, requires_grad=True)
        module_seconds = _shortest(lambda: torch.autograd.backward(layer(x), torch.ones_like(x)))
    return max(0.0, (pipeline_seconds - module_seconds) / 2)  # a forward and a backward


def optimizer_byte_seconds(device: torch.device) -> float:
    """Return the seconds that a step of AdamW takes on this device for each further byte of its state."""
    factor = 1 if device.type == "cpu" else ACCELERATOR_FACTOR
    small, large = FEWER_VALUES * factor, MORE_VALUES * factor
    seconds = _update_seconds(large, device) - _update_seconds(small, device)
    return max(0.0, seconds) / (OPTIMIZER_VALUES * torch.float32.itemsize * (large - small))


def _update_seconds(values: int, device: torch.device) -> float:
    """Time a step of AdamW with this many values."""
    weight = nn.Parameter(torch.zeros(values, device=device, dtype=torch.float32))
    weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.AdamW([weight])

    def step() -> None:
        optimizer.step()
        weight[0].item()  # waits for the device

    step()  # makes its state
    return _shortest(step)


def _step_seconds(microbatches: int) -> float:
    layers = nn.Sequential(*(nn.Linear(8, 8, **ON_CPU) for _ in range(STAGES)))
    x = torch.zeros(microbatches, 8, **ON_CPU)
    options = Options(loss_fn=nn.functional.mse_loss, balance="layers")
    order = generate("1f1b", STAGES, microbatches)
    with build(layers, ((x,), {}), World(STAGES), order, options) as pipe:
        return _shortest(lambda: pipe.step(x, target=x))


def _shortest(run: Callable[[], object]) -> float:
    return min(timeit.repeat(run, number=1, repeat=STEPS))
