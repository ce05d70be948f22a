"""`penstock profile`: measures what each part of a model costs on this device, or estimates it for another."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import TYPE_CHECKING, Annotated

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock._base.errors import check_counts
from penstock._base.files import check_writable
from penstock._base.words import counted, in_ranges, sized
from penstock.cli._options import check_count, integers, option, output_option, spread
from penstock.cli._target import Leaves, Microbatches, Opens, TargetName, loaded, names, profile_target
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.costs import Profile, UnitCost


@spread
def profile(
    target: TargetName,
    microbatches: Microbatches = None,
    microbatch_sizes: Annotated[
        str | None, option("Instead: the rows of each microbatch to measure, such as 1,2,4,8.", metavar="ROWS")
    ] = None,
    device: Annotated[
        str | None,
        option(
            "Where to run, such as cuda; by default where the inputs are. Or what to estimate for, without "
            "running: a name from `penstock devices`, such as h100, or the .toml file of another."
        ),
    ] = None,
    calibrate: Annotated[
        list[str] | None,
        option(
            "For an estimate: what was measured on such devices, of any model (--json); repeat it for more.",
            metavar="FILE",
        ),
    ] = None,
    threads: Annotated[
        int | None, option("Threads to measure with, such as a rank will have: cores / ranks. Default: torch's.")
    ] = None,
    budget_seconds: Annotated[float, option("How long to measure each size.")] = 2.0,
    links: Annotated[
        bool,
        option(
            "Also measure latency and bandwidth between ranks: under `penstock run --ranks 4 -m penstock profile "
            "...`, or torchrun.",
            "--links",
        ),
    ] = False,
    leaves: Leaves = None,
    opens: Opens = None,
    json: Annotated[str | None, output_option("Also write the profile to this file, for --balance.")] = None,
) -> None:
    """Measure what each part of a model costs: time forward and backward, and memory, for one microbatch.

    TARGET is a function that returns (model, args, target, loss), as for
    `penstock verify`; the loss is not measured. Each module before which the model
    can be cut is run, in order as in a step (repeated blocks of a large model once
    for all). `--balance profile.json` of
    other commands, and `balance=` of `penstock.pipeline`, cut by the file.

    With `--device h100` nothing is run: times are estimated from the operations
    and bytes of each part and the device's specifications, and marked so.
    """
    from penstock.pipe.profiling import specified

    prints = not links or os.environ.get("RANK", "0") == "0"
    check_writable(json if prints else None, f"--json {json}")
    check_counts(required=False, threads=threads)
    rows = None if microbatch_sizes is None else integers("--microbatch-sizes", microbatch_sizes)
    for number in rows or ():
        check_count("--microbatch-sizes", number)
    with loaded(target, "the model", weights=specified(device) is None) as given:
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        found = profile_target(
            given,
            microbatches=microbatches,
            microbatch_sizes=rows,
            leaves=names(leaves),
            opens=names(opens),
            device=device,
            budget_seconds=budget_seconds,
            calibrate=calibrate or (),
            links=links,
            target=given.target,
        )
    if not prints:
        return
    console = Console(highlight=False)
    show(found, console)
    if json is not None:
        found.save(json)
        uses = f"penstock plan --profile {json}, or penstock.pipeline(..., balance={json!r})"
        console.print(Text(f"\nwritten to {json}: {uses}"), soft_wrap=True)


def show(found: Profile, console: Console) -> None:
    """Prints the table, with the sums of each row: times, their share of all, and the bytes that are kept for the
    backward and held as parameters; and what the row's first unit gets."""
    from penstock.costs.sizes import doubts

    inputs = ", ".join(f"{name} {text}" for name, text in found.inputs.items())
    runs = f"{counted(found.runs, 'run')} each" if found.source == "measured" else "an estimate"
    if found.action_seconds is not None:
        runs += f"; the runtime adds {1e6 * found.action_seconds:.0f} us to each forward and backward of a stage"
    of = f"{counted(len(found.units), 'unit')} on {found.device_name or found.device}"
    console.print(Text(f"{of}, {runs}", "bold"), soft_wrap=True)
    console.print(Text(f"for one microbatch: {inputs}"), end="\n\n", soft_wrap=True)
    print_unbroken(console, _units(found))
    if (split := [unit.split for unit in found.units]) != [*found.units]:
        times = [1e3 * sum(column) for column in zip(*map(_parts, split), strict=True)]
        forward, inputs, weights = (f"{each:.3f}" for each in times)
        console.print(f"\nsplit backwards, all units: F {forward}, I {inputs}, W {weights} ms")
    if len(rows_of(found.units)) < len(_alike(found.units)):
        console.print("\nA row ending in * is for several units of one module. --json FILE writes each by itself.")
    if found.others:
        console.print("\nall units, by the rows of a microbatch")
        print_unbroken(console, _sizes(found))
    if found.links:
        console.print(f"\nlinks between ranks, for messages of {sized(found.links[0].message_bytes)}")
        print_unbroken(console, _links(found))
    for note in (*found.notes, *doubts(found)):
        console.print(Text(f"note: {note}"), soft_wrap=True)


def _sizes(found: Profile) -> Table:
    """A row for each size: the times of all units, the rows in a second of forward and backward, and what they keep."""
    made = table("rows", "F ms", "I ms", "W ms", "rows/s", "keeps")
    for each in found.each_size:
        sums = [sum(times) for times in zip(*map(_parts, each.units), strict=True)]
        rate = f"{each.rows / sum(sums):,.0f}" if sum(sums) else "-"
        keeps = sized(sum(unit.activation_bytes for unit in each.units))
        made.add_row(str(each.rows), *(f"{1e3 * one:.3f}" for one in sums), rate, keeps)
    return made


def _links(found: Profile) -> Table:
    made = table("from", "to", "latency us", "GB/s", left=0)
    for link in found.links:
        rate = "-" if link.bytes_per_second is None else f"{link.bytes_per_second / 1e9:.3g}"
        made.add_row(str(link.source), str(link.target), f"{1e6 * link.latency_seconds:.1f}", rate)
    return made


def _parts(unit: UnitCost) -> tuple[float, float, float]:
    return unit.forward_seconds, unit.input_gradient_seconds, unit.weight_gradient_seconds


def _units(found: Profile) -> Table:
    """A row for units that follow each other, and one for all."""
    shared = _shared([unit.name for unit in found.units])
    made = table(
        f"in {shared}" if shared else "unit", "F ms", "I ms", "W ms", "spread", "share", "keeps", "holds", "gets"
    )
    total = sum(unit.seconds for unit in found.units) or 1.0
    every = list(found.units)
    for name, units in [*rows_of(found.units), *([("all", every)] if len(every) > 1 else [])]:
        made.add_row(
            Text(name.removeprefix(f"{shared}.")),
            *(f"{1e3 * sum(times):.3f}" for times in zip(*map(_parts, units), strict=True)),
            f"{max(unit.spread for unit in units):.0%}" if found.source == "measured" else "-",
            f"{sum(unit.seconds for unit in units) / total:.1%}",
            sized(sum(unit.activation_bytes for unit in units)),
            sized(sum(unit.parameter_bytes for unit in units)),
            sized(units[0].boundary_bytes),
        )
    return made


def rows_of(units: Sequence[UnitCost], most: int = 30) -> list[tuple[str, list[UnitCost]]]:
    """The rows of a table of at most `most` rows where names allow, each with its name.

    Units of one kind that follow each other have one row. If those are too many rows, all units of a module have one.
    """
    rows = _alike(units)
    depth = max((unit.name.count(".") for unit in units), default=0)
    while len(rows) > most and depth:
        rows = [[*group] for _, group in groupby(units, lambda unit: unit.name.split(".")[:depth])]  # noqa: B023  (called at once)
        depth -= 1
    return [(_name(row), row) for row in rows]


def _name(units: Sequence[UnitCost]) -> str:
    ranges = in_ranges(unit.name for unit in units)
    return ranges[0] if len(ranges) == 1 else f"{_shared([f'{unit.name}.' for unit in units])}.*"


def _shared(dotted: Sequence[str]) -> str:
    """The modules that all of these names are in."""
    parts = [name.split(".")[:-1] for name in dotted]
    together = takewhile(lambda level: len({*level}) == 1, zip(*parts, strict=False))
    return ".".join(level[0] for level in together)


def _alike(units: Sequence[UnitCost]) -> list[list[UnitCost]]:
    """Units that follow each other and are of one kind, together."""
    return [[*group] for _, group in groupby(units, lambda unit: unit.like or unit.name)]
