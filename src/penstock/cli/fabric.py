"""`penstock fabric`: what a job sends over its network, on hosts that are made here or started by torchrun."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from penstock.cli._live import Follower, follower
from penstock.cli._spread import OUTPUT_PANEL, Json, spread
from penstock.cli._traffic import DEFAULT_HOSTS, CountOptions, TrafficOptions
from penstock.errors import ArgumentError, FabricError
from penstock.fabric.emulation.spec import ENGINE, Spec
from penstock.fabric.samples import RUN

if TYPE_CHECKING:
    from penstock.fabric.network.machines import Machines

app = typer.Typer(add_completion=False, invoke_without_command=True)

RUNS = Path("runs")

Folder = Annotated[Path, typer.Argument(metavar="FOLDER", help="Of a run.")]


@dataclass(frozen=True, slots=True)
class RunOptions:
    """How it is sent."""

    hosts: Annotated[
        int | None, typer.Option(help=f"Makes so many hosts on this machine; {DEFAULT_HOSTS} if nothing is said.")
    ] = None
    link: Annotated[
        str | None, typer.Option(metavar="TEXT", help='What joins each host to the switch, as for tc: "100mbit".')
    ] = None
    algorithm: Annotated[
        str, typer.Option(help=f"Of the collectives: ring, tree, ...; {ENGINE}: torch.distributed's own.")
    ] = "ring"
    overlap: Annotated[bool, typer.Option("--overlap", help="Computing goes on while something is sent.")] = False
    warmup: Annotated[int, typer.Option(help="Trials before the first that counts; their results are checked.")] = 3
    seed: Annotated[int, typer.Option(help="Of the payload.")] = 0
    backend: Annotated[str, typer.Option(help="Of torch.distributed: gloo, nccl, mpi.")] = "gloo"
    join_timeout: Annotated[float, typer.Option(help="Seconds in which every host has to be there.")] = 120.0
    stall_timeout: Annotated[float, typer.Option(help="Seconds after which a wait for a host is given up.")] = 120.0


@app.callback()
@spread
def fabric(
    ctx: typer.Context,
    traffic: TrafficOptions,
    how: RunOptions,
    counts: CountOptions,
    out: Annotated[
        Path | None,
        typer.Option(help="The run's folder; runs/fabric-<n> if nothing is said.", rich_help_panel=OUTPUT_PANEL),
    ] = None,
    chakra: Annotated[
        bool,
        typer.Option(
            "--chakra", help="Write the workload as Chakra traces, a rank a file.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Emulate what a training job sends over its network: how long each collective takes, its tail included.

    Hosts are namespaces of this machine that are joined by shaped links
    (--hosts 4 --link 100mbit, as root), plain processes of it (--hosts 4), or
    real ones: start this same command with torchrun on each, without --hosts.
    """
    if ctx.invoked_subcommand is not None:
        return
    by_torchrun = "RANK" in os.environ and how.hosts is None
    hosts = int(os.environ["WORLD_SIZE"]) if by_torchrun else how.hosts or DEFAULT_HOSTS
    workload = traffic.workload(hosts)
    from penstock.fabric.network.checks import why_not
    from penstock.fabric.network.link import parse_link

    link = None if how.link is None else parse_link(how.link)
    reason = why_not() if link is not None and not by_torchrun else None
    spec = Spec(
        workload,
        hosts,
        how.algorithm,
        counts.count(),
        how.warmup,
        how.overlap,
        how.seed,
        link.bytes_per_second if link is not None and reason is not None else None,
        how.join_timeout,
        how.stall_timeout,
        how.backend,
        link=how.link,
    )
    if by_torchrun and link is not None:
        raise ArgumentError("--link shapes hosts that are made here; torchrun's have a network: leave it out")
    folder = _folder(out, make=not by_torchrun or os.environ["RANK"] == "0")
    if by_torchrun:
        _as_host(spec, folder, as_json=as_json)
        return
    if reason is not None:
        print(f"penstock: {reason}; messages are delayed in their processes instead", file=sys.stderr)
    failure: FabricError | None = None
    try:
        with _machines(hosts, None if reason else link) as machines, _followed(spec, quiet=as_json) as watch:
            from penstock.fabric.emulation.coordinate import emulate

            emulate(spec, folder, machines, watch)
    except FabricError as error:
        failure = error
    except KeyboardInterrupt:
        failure = FabricError("stopped")
    if (folder / RUN).exists():
        _report(folder, as_json=as_json, chakra=chakra)
    if failure is not None:
        raise failure


def _folder(out: Path | None, *, make: bool) -> Path:
    """Where the run goes: never over another one.

    Raises:
        ArgumentError: the folder has a run already, or cannot be made.
    """
    if out is None:
        number = 1
        while (RUNS / f"fabric-{number}").exists():
            number += 1
        out = RUNS / f"fabric-{number}"
    if make and (out / RUN).exists():
        raise ArgumentError(f"--out {out} has a run already: give another folder, or remove that one")
    try:
        if make:
            out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out {out}: {error.strerror}") from None
    return out


def _as_host(spec: Spec, folder: Path, *, as_json: bool) -> None:
    """On a host that torchrun has started."""
    from penstock.fabric.emulation.host import run

    if os.environ["RANK"] != "0":
        run(spec, folder)
        return
    try:
        with _followed(spec, quiet=as_json) as watch:
            run(spec, folder, watch)
    finally:
        if (folder / RUN).exists():
            _report(folder, as_json=as_json, chakra=False)


@contextmanager
def _machines(hosts: int, link: Any) -> Iterator[Machines | None]:
    """Namespaces, where a link is asked for."""
    if link is None:
        yield None
        return
    from penstock.fabric.network.machines import Machines

    with Machines(hosts, link) as machines:
        yield machines


def _followed(spec: Spec, *, quiet: bool) -> AbstractContextManager[Follower | None]:
    return follower([transfer.name for transfer in spec.workload.transfers], spec.trials, quiet=quiet)


def _report(folder: Path, *, as_json: bool, chakra: bool = False, as_nccl: bool = False) -> None:
    """Reads a run, writes beside it what is made from it, and shows it."""
    from penstock.fabric.models import links_json
    from penstock.fabric.report import nccl
    from penstock.fabric.report.page import write_page
    from penstock.fabric.report.text import show
    from penstock.fabric.results import results
    from penstock.fabric.samples import Run
    from penstock.fabric.workload import Workload

    run = Run.read(folder)
    found = results(run)
    made = ["results.json"]
    (folder / "results.json").write_text(json.dumps(found, indent=1))
    if run.record.get("links"):
        (folder / "links.json").write_text(json.dumps(links_json(run.record), indent=1))
        made.append("links.json")
    notes = []
    if len(run.start_ns):
        try:
            write_page(run, found, folder / "report.html")
            made.append("report.html")
        except ArgumentError as error:
            notes.append(str(error))
    if chakra:
        from penstock.fabric.chakra import write_chakra

        made += [
            path.name for path in write_chakra(Workload.from_dict(run.record["workload"]), folder, run.record["hosts"])
        ]
    if as_json:
        print(json.dumps(found))
        return
    if as_nccl:
        print(nccl.text(run, found))
        return
    console = Console(highlight=False)
    show(run, found, console)
    console.print(f"\n{folder}: samples.csv, {', '.join(made)}", style="dim", soft_wrap=True)
    for note in notes:
        console.print(note, style="dim", soft_wrap=True)


@app.command("show")
def show_run(
    folder: Folder,
    nccl: Annotated[bool, typer.Option("--nccl", help="As nccl-tests prints it.")] = False,
    chakra: Annotated[bool, typer.Option("--chakra", help="Write Chakra traces, a rank a file, into FOLDER.")] = False,
    as_json: Json = False,
) -> None:
    """Show a run again, also one that was killed: what was sampled until then."""
    _report(folder, as_json=as_json, chakra=chakra, as_nccl=nccl)


@app.command("compare")
def compare_runs(
    first: Annotated[Path, typer.Argument(metavar="A", help="A run's folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another's.")],
    as_json: Json = False,
) -> None:
    """Compare two runs, transfer by transfer, with a test of whether they differ."""
    from penstock.fabric.compare import compare
    from penstock.fabric.report.text import show_comparison
    from penstock.fabric.samples import Run

    found = compare(Run.read(first), Run.read(second))
    if as_json:
        print(json.dumps(found.to_dict()))
    else:
        show_comparison(found, Console(highlight=False))


@app.command("clean")
def clean_up(
    force: Annotated[bool, typer.Option("--force", help="Also of an emulation that still runs.")] = False,
) -> None:
    """Remove what an emulation that crashed has left: namespaces with our prefix, and nothing else."""
    from penstock.fabric.network.machines import clean

    removed = clean(force=force)
    for name in removed:
        print(f"removed {name}")
    if not removed:
        print("nothing is left")
