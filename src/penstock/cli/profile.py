"""`penstock profile`: measures the costs of each part of a model on this device, or estimates them for another."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING

from rich.console import Console

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.files import check_writable
from penstock._base.formatting import collapse_ranges, format_bytes, pluralize
from penstock.cli._options import check_count, integers, option, output_option, screen
from penstock.cli._target import LEAF_MODULES, OF_BATCH, SPLIT_INSIDE, TARGET, load_target, parse_names, profile_target
from penstock.report.text import print_columns

if TYPE_CHECKING:
    from penstock.costs import Profile, UnitCost

TIME_LIMIT = 2.0


def profile(
    target: str = TARGET,
    microbatches: int | None = OF_BATCH,
    microbatch_sizes: str | None = option("Microbatch sizes to measure instead, such as 1,2,4,8.", metavar="SAMPLES"),
    device: str | None = option(
        "Device to run on, such as cuda; default: that of the inputs. Or a device to estimate for without "
        "running: a name from `penstock devices`, such as h100, or the .toml file of another."
    ),
    calibrate: list[str] | None = option(
        "Profile measured on such a device, of any model, to calibrate an estimate; repeatable.", metavar="FILE"
    ),
    threads: int | None = option("Threads to measure with, such as those of a rank: cores / ranks. Default: torch's."),
    time_limit: float = option("Seconds to measure each size for.", default=TIME_LIMIT),
    links: bool = option(
        "Also measure latency and bandwidth between ranks: under `penstock run --ranks 4 -m penstock profile "
        "...`, or torchrun.",
        "--links",
        default=False,
    ),
    leaf_modules: str | None = LEAF_MODULES,
    split_inside: str | None = SPLIT_INSIDE,
    out: str | None = output_option("Also write the profile to this file, for --balance.", metavar="FILE"),
) -> None:
    """Measure what each part of a model costs for one microbatch: forward and backward time, and memory.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`; the loss is not measured. Each module before which the model
    can be cut is run, in the order of a step; of repeated blocks of a large model,
    only one is run. `--balance profile.json` of other commands, and `balance=` of
    `penstock.pipeline`, use the file.

    With `--device h100` nothing is run: times are estimated from the operations
    and bytes of each part and the device's specifications, and marked as such.
    """
    from penstock.pipe.profiling import find_device_spec

    prints = not links or os.environ.get("RANK", "0") == "0"
    check_writable(out if prints else None, f"--out {out}")
    check_counts(required=False, threads=threads)
    rows = None if microbatch_sizes is None else integers("--microbatch-sizes", microbatch_sizes)
    for number in rows or ():
        check_count("--microbatch-sizes", number)
    estimate = find_device_spec(device) is not None
    if estimate and (threads is not None or time_limit != TIME_LIMIT):
        unused = f"--threads {threads}" if threads is not None else f"--time-limit {time_limit:g}"
        raise ArgumentError(f"{unused}: an estimate (--device {device}) measures nothing; omit it")
    with load_target(target, "the model", weights=not estimate) as loaded_target:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        measured = profile_target(
            loaded_target,
            microbatches=microbatches,
            microbatch_sizes=rows,
            leaf_modules=parse_names(leaf_modules),
            split_inside=parse_names(split_inside),
            device=device,
            budget_seconds=time_limit,
            calibrate=calibrate or (),
            links=links,
            target=loaded_target.target,
        )
    if not prints:
        return
    console = screen()
    show(measured, console)
    if out is not None:
        measured.save(out)
        uses = f"penstock plan --profile {out}, or penstock.pipeline(..., balance={out!r})"
        console.print(f"\nwritten to {out}: {uses}", soft_wrap=True)


def show(profile: Profile, console: Console) -> None:
    """Print the units, their totals by microbatch size, the links, and notes on their quality."""
    from penstock.costs.sizes import profile_notes

    inputs = ", ".join(f"{name} {text}" for name, text in profile.inputs.items())
    runs = f"{pluralize(profile.runs, 'run')} each" if profile.source == "measured" else "an estimate"
    if profile.action_seconds is not None:
        runs += f"; the runtime adds {1e6 * profile.action_seconds:.0f} us to each forward and backward of a stage"
    head = f"{pluralize(len(profile.units), 'unit')} on {profile.device_name or profile.device}"
    console.print(f"{head}, {runs}", style="bold", soft_wrap=True)
    console.print(f"for one microbatch: {inputs}", end="\n\n", soft_wrap=True)
    _show_units(profile, console)
    if (split := [unit.split for unit in profile.units]) != [*profile.units]:
        forward, inputs, weights = _times(split)
        console.print(f"\nsplit backwards, all units: F {forward}, I {inputs}, W {weights} ms")
    if len(summarize_units(profile.units)) < len(_merge_equal(profile.units)):
        console.print("\nA row ending in * covers several units of one module; --out FILE writes each unit.")
    if profile.others:
        console.print("\nall units, by microbatch size")
        sizes = profile.each_size
        seconds = [sum(unit.seconds for unit in size.units) for size in sizes]
        columns: dict[str, Iterable[object]] = {
            "size": [size.rows for size in sizes],
            **_columns([size.units for size in sizes]),
            "samples/s": [
                f"{size.rows / time:,.0f}" if time else "-" for size, time in zip(sizes, seconds, strict=True)
            ],
            "activations": [format_bytes(sum(unit.activation_bytes for unit in size.units)) for size in sizes],
        }
        print_columns(console, columns)
    if profile.links:
        console.print(f"\nlinks between ranks, for messages of {format_bytes(profile.links[0].message_bytes)}")
        rates = [link.bytes_per_second for link in profile.links]
        columns = {
            "from": [link.source for link in profile.links],
            "to": [link.target for link in profile.links],
            "latency us": [f"{1e6 * link.latency_seconds:.1f}" for link in profile.links],
            "GB/s": ["-" if rate is None else f"{rate / 1e9:.3g}" for rate in rates],
        }
        print_columns(console, columns, left=0)
    for note in profile_notes([profile]):
        console.print(f"note: {note}", soft_wrap=True)


def _times(units: Sequence[UnitCost]) -> list[str]:
    """Return the total time of F, I and W, in milliseconds."""
    parts = ("forward_seconds", "input_gradient_seconds", "weight_gradient_seconds")
    return [f"{1e3 * sum(getattr(unit, part) for unit in units):.3f}" for part in parts]


def _columns(rows: Sequence[Sequence[UnitCost]]) -> dict[str, Iterable[object]]:
    return dict(zip(("F ms", "I ms", "W ms"), zip(*map(_times, rows), strict=True), strict=True))


def _show_units(profile: Profile, console: Console) -> None:
    """Print one row per sequence of equal units, and one for all."""
    shared = _shared([unit.name for unit in profile.units])
    total = sum(unit.seconds for unit in profile.units) or 1.0
    rows = [*summarize_units(profile.units), *([("total", list(profile.units))] if len(profile.units) > 1 else [])]
    measured, units = profile.source == "measured", [row for _, row in rows]
    columns: dict[str, Iterable[object]] = {
        f"in {shared}" if shared else "unit": [name.removeprefix(f"{shared}.") for name, _ in rows],
        **_columns(units),
        "spread": [f"{max(unit.spread for unit in row):.0%}" if measured else "-" for row in units],
        "% time": [f"{sum(unit.seconds for unit in row) / total:.1%}" for row in units],
        "activations": [format_bytes(sum(unit.activation_bytes for unit in row)) for row in units],
        "parameters": [format_bytes(sum(unit.parameter_bytes for unit in row)) for row in units],
        "input": [format_bytes(row[0].boundary_bytes) for row in units],
    }
    print_columns(console, columns)


def summarize_units(units: Sequence[UnitCost], max_rows: int = 30) -> list[tuple[str, list[UnitCost]]]:
    """Return the rows of a table with their names, at most `max_rows` if names allow.

    A sequence of equal units has one row. If that makes too many rows, the units of a module have one.
    """
    rows = _merge_equal(units)
    depth = max((unit.name.count(".") for unit in units), default=0)
    while len(rows) > max_rows and depth:
        rows = [[*group] for _, group in groupby(units, lambda unit: unit.name.split(".")[:depth])]  # noqa: B023  (called at once)
        depth -= 1
    return [(_name(row), row) for row in rows]


def _name(units: Sequence[UnitCost]) -> str:
    ranges = collapse_ranges(unit.name for unit in units)
    return ranges[0] if len(ranges) == 1 else f"{_shared([f'{unit.name}.' for unit in units])}.*"


def _shared(dotted: Sequence[str]) -> str:
    """Return the modules that contain all of these names."""
    parts = [name.split(".")[:-1] for name in dotted]
    common = takewhile(lambda level: len({*level}) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in common)


def _merge_equal(units: Sequence[UnitCost]) -> list[list[UnitCost]]:
    """Group consecutive units that are equal."""
    return [[*group] for _, group in groupby(units, lambda unit: unit.like or unit.name)]
