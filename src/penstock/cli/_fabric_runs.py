"""`penstock fabric show`, `compare` and `clean`: show runs again, compare them, and remove what a crash left behind."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console

from penstock._base.errors import ArgumentError
from penstock._base.files import finite, write_json
from penstock.cli._options import Json, option

if TYPE_CHECKING:
    from penstock.network.fabric.samples import Run

Average = Literal["avg", "max", "min", "rank0"]
"""The averages of `penstock.network.fabric.views.nccl`, which is loaded only when needed."""

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder.")]


@dataclass(frozen=True, slots=True)
class Output:
    """Where a run is written, and how it is shown."""

    folder: Path
    as_json: bool = False
    chakra: bool = False
    as_nccl: bool = False
    average: Average = "avg"


def prepare() -> None:
    """Imports what `report` needs. That takes a second, which is better spent before a run than after a Ctrl-C."""
    for module in ("views.nccl", "views.text", "results"):
        import_module(f"penstock.network.fabric.{module}")
    for module in ("scipy.optimize", "scipy.special", "scipy.stats"):
        import_module(module)


def report(output: Output, *, page: bool = True) -> None:
    """Reads a run, writes its results next to it, and shows it.

    `page`: also write the page and its pictures, which takes a few seconds.
    """
    from penstock.network.fabric.results import results
    from penstock.network.fabric.samples import Run
    from penstock.network.fabric.views import nccl
    from penstock.network.fabric.views.text import show

    folder = output.folder
    run = Run.read(folder)
    found = results(run)
    made, notes = _files(folder, run, found, chakra=output.chakra, page=page)
    if output.as_json:
        print(json.dumps(finite(nccl.to_dict(run, found, output.average) if output.as_nccl else found)))
        return
    if output.as_nccl:
        print(nccl.text(run, found, output.average))
        return
    console = Console(highlight=False)
    show(run, found, console)
    console.print(f"\n{folder}: samples.csv, {', '.join(made)}", style="dim", soft_wrap=True)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)


def _files(folder: Path, run: Run, found: dict[str, Any], *, chakra: bool, page: bool) -> tuple[list[str], list[str]]:
    """Writes a run's results into its folder. Returns the names of the files, and notes on what could not be made."""
    from penstock.network.fabric.alpha_beta import links_json
    from penstock.network.fabric.workload import Workload

    made, notes = ["results.json"], []
    write_json(folder / "results.json", found)
    if (links := links_json(run.record, found["model"])) is not None:
        write_json(folder / "links.json", links)
        made.append("links.json")
    if len(run.start_ns) and not page:
        notes.append(f"`penstock fabric show {folder}` makes report.html")
    elif len(run.start_ns):
        from penstock.network.fabric.views.page import write_page

        write_page(run, found, folder / "report.html")
        made.append("report.html")
    if chakra:
        from penstock.network.fabric.chakra import write_chakra

        workload = Workload.from_dict(run.record["workload"])
        made += [path.name for path in write_chakra(workload, folder, run.record["hosts"])]
    return made, notes


def show_run(
    folder: Folder,
    nccl: Annotated[bool, option("As nccl-tests prints it; with --json, its JSON.", "--nccl")] = False,
    average: Annotated[
        Average | None, option("With --nccl, over the ranks: avg, as nccl-tests does by default (-a), ...")
    ] = None,
    chakra: Annotated[bool, option("Write Chakra traces to FOLDER, one file per rank.", "--chakra")] = False,
    as_json: Json = False,
) -> None:
    """Show a run again. If it was killed, show what it had sampled until then."""
    if average is not None and not nccl:
        raise ArgumentError(
            "--average is for --nccl: Penstock's own tables have the slowest rank; pass both, or neither"
        )
    report(Output(folder, as_json, chakra, nccl, average or "avg"))


def compare_runs(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run's folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another run's folder.")],
    as_json: Json = False,
) -> None:
    """Compare two runs, transfer by transfer, and test whether they differ."""
    from penstock.network.fabric.compare import compare
    from penstock.network.fabric.results import results
    from penstock.network.fabric.samples import Run
    from penstock.network.fabric.views.facts import warnings
    from penstock.network.fabric.views.text import show_comparison

    runs = Run.read(first), Run.read(second)
    found = compare(*runs)
    warned = [warnings(run, results(run)) for run in runs]
    if as_json:
        print(json.dumps(finite({**found, "warnings": dict(zip("ab", warned, strict=True))})))
    else:
        show_comparison(found, Console(highlight=False), (str(first), str(second)), warned)


def clean_up(
    force: Annotated[bool, option("Also those of a running emulation.", "--force")] = False,
) -> None:
    """Remove what a crashed emulation left behind: namespaces with Penstock's prefix, and nothing else."""
    from penstock.network.machines import clean

    removed = clean(force=force)
    for name in removed:
        print(f"removed {name}")
    if not removed:
        print("nothing to clean up")
