"""`penstock fabric`: emulates the network traffic of a job, on hosts created here or started by torchrun."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from penstock._base.errors import ArgumentError, FabricError, require
from penstock.cli._errors import Commands
from penstock.cli._fabric_runs import Output, clean_up, compare_runs, predict, prepare, report, show_run
from penstock.cli._network import NetworkOptions
from penstock.cli._options import JSON, option, output_option, print_json, screen, spread
from penstock.cli._traffic import DEFAULT_HOSTS, CountOptions, TrafficOptions
from penstock.network.fabric.algorithms import ENGINE
from penstock.network.fabric.emulation.spec import Spec, Watch, default_algorithm, planned_traffic
from penstock.network.fabric.samples import RUN, SAMPLES
from penstock.network.fabric.views.numbers import NONE
from penstock.network.fabric.workload import group_similar_layers, groups
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.network.fabric.workload import Workload
    from penstock.network.machines import Machines
    from penstock.network.scenario import Event


RUNS = Path("runs")

_BUFFERS = 2
"""Minimum number of buffers per host and transfer: its input, and data to send or receive."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options for running the emulation."""

    hosts: int | None = option(f"Number of hosts to create on this machine; default {DEFAULT_HOSTS}.")
    algorithm: str | None = option(
        f"Algorithm of the collectives: ring, tree, ...; {ENGINE}: torch.distributed's own. Default: ring, or another "
        "one for a collective without a ring."
    )
    overlap: bool = option("Compute while sending.", "--overlap", default=False)
    warmup: int | None = option(
        "Warm-up trials, whose results are checked. Default: 3 with checked results, then as many as it takes "
        "until a test finds the times steady."
    )
    iterations: int = option(
        "Repetitions of each transfer within a trial, as in nccl-tests; times are per repetition.", default=1
    )
    seed: int = option("Seed of the payload.", default=0)
    backend: str = option("Backend of torch.distributed: gloo, nccl.", default="gloo")
    join_timeout: float = option("Seconds to wait for every host to join.", default=120.0)
    stall_timeout: float = option("Seconds after which an unresponsive host ends the run.", default=120.0)

    def spec(self, workload: Workload, hosts: int, machines: Machines | None, trials: int) -> Spec:
        """Return the specification of a run of `workload` on these hosts."""
        options = {name: getattr(self, name) for name in ("warmup", "overlap", "iterations", "seed", "backend")}
        topology = None if machines is None else machines.topology
        return Spec(
            workload=workload,
            hosts=hosts,
            algorithm=self.algorithm or default_algorithm(workload),
            trials=trials,
            join_seconds=self.join_timeout,
            stall_seconds=self.stall_timeout,
            link=None if topology is None else str(topology.link),
            **options,
        )


def fabric(
    ctx: typer.Context,
    traffic: TrafficOptions,
    run_options: RunOptions,
    network: NetworkOptions,
    counts: CountOptions,
    out: Path | None = output_option("Directory of the run; default runs/fabric-<n>."),
    chakra: bool = output_option("Write the workload as Chakra traces, one file per rank.", "--chakra", default=False),
    dry_run: bool = output_option(
        "Check the options and show what would be sent; send nothing.", "--dry-run", default=False
    ),
    as_json: bool = JSON,
) -> None:
    """Emulate the network traffic of a training job: how long each collective takes, including its tail.

    Hosts are namespaces on this machine joined by shaped links (--hosts 4
    --link 100mbit, as root), plain processes on it (--hosts 4), or real
    machines: run `torchrun ... -m penstock fabric ...` on each, without --hosts.
    """
    if ctx.invoked_subcommand is not None:
        _refuse_options(ctx)
        return
    require("fabric", "jinja2", "scipy", for_what="penstock fabric")
    by_torchrun = "RANK" in os.environ and run_options.hosts is None
    hosts = DEFAULT_HOSTS if run_options.hosts is None else run_options.hosts
    if by_torchrun:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # no C++ stack if a host does not join
        from penstock.network.fabric.emulation.rendezvous import read_torchrun_env

        hosts = read_torchrun_env()[1]
    if by_torchrun and network.given():
        raise ArgumentError(
            f"{network.given()[0]} is for hosts created here; torchrun's hosts have their own network: omit it"
        )
    # Without a link or a slowed host, they are plain processes.
    machines, events = network.machines(hosts) if network.given() else (None, ())
    if machines is not None:
        from penstock.network.namespaces import why_not

        if (reason := why_not()) is not None:
            raise FabricError(f"{reason}. Without --link and --slow, hosts are plain processes of this machine")
    spec = run_options.spec(traffic.workload(hosts), hosts, machines, counts.count())
    _check(spec, 1 if by_torchrun else hosts)
    first = not by_torchrun or os.environ["RANK"] == "0"
    if dry_run:
        if first:
            _dry_run(spec, machines, out, chakra=chakra, as_json=as_json)
        return
    output = Output(_folder(out, check=first), as_json, chakra)
    if first:
        try:
            output.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ArgumentError(f"--out {output.folder}: {error.strerror}") from None
    if by_torchrun:
        _as_host(spec, output)
    else:
        _on_hosts(spec, machines, events, output)


app = typer.Typer(cls=Commands, add_completion=False, invoke_without_command=True)
app.callback()(spread(fabric))
app.command("show")(spread(show_run))
app.command("compare")(spread(compare_runs))
app.command("predict")(spread(predict))
app.command("clean")(spread(clean_up))


def _check(spec: Spec, hosts_here: int) -> None:
    """Raise ArgumentError if torch lacks the backend, or if payloads exceed the memory."""
    if spec.backend != "gloo":  # gloo is always there; checking another imports torch
        from penstock.network.fabric.emulation.collectives import check_backend

        check_backend(spec.backend)
    required = _BUFFERS * hosts_here * sum(transfer.bytes for transfer in spec.workload.transfers)
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if required > available:
        raise ArgumentError(
            f"the transfers take {required / 1024**3:,.1f} GiB of memory on {hosts_here} hosts, but this machine has "
            f"{available / 1024**3:,.1f}: pass smaller sizes, or fewer hosts"
        )


def _on_hosts(spec: Spec, hosts: Machines | None, events: Sequence[Event], output: Output) -> None:
    """Create the hosts, run the emulation, and report the samples, however the job ended."""
    from penstock.network.fabric.emulation.coordinate import emulate

    prepare()
    failure: FabricError | None = None
    stopped = 0
    try:
        with hosts or nullcontext() as machines, _progress(spec.trials, quiet=output.as_json) as watch:
            if machines is not None:
                network: Any = machines.describe()
                spec = replace(spec, network=network)
            emulate(spec, output.folder, machines, watch, events=events)
    except FabricError as error:
        failure = error
    except KeyboardInterrupt as error:
        joined, stopped = (output.folder / RUN).exists(), error.args[0] if error.args else signal.SIGINT
        failure = FabricError(
            "stopped" + ("" if joined else f" before all hosts had joined; {output.folder} has no run")
        )
    if (output.folder / RUN).exists():
        report(output, page=not stopped)  # after Ctrl-C the user is waiting
    if stopped:
        sys.stdout.flush()
        print(f"penstock: error: {failure}", file=sys.stderr)
        raise typer.Exit(128 + stopped)  # as for any command that a signal ended
    if failure is not None:
        raise failure


def _folder(out: Path | None, *, check: bool = True) -> Path:
    """Return the run's directory. `check`: raise ArgumentError if it contains another run, or cannot be written."""
    number = 1
    while out is None and (RUNS / f"fabric-{number}").exists():
        number += 1
    folder = out or RUNS / f"fabric-{number}"
    if check and ((folder / RUN).exists() or (folder / SAMPLES).exists()):
        raise ArgumentError(f"--out {folder} already contains a run: pass another directory, or remove that one")
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if check and not (existing.is_dir() and os.access(existing, os.W_OK)):
        why = os.strerror(errno.EACCES if existing.is_dir() else errno.ENOTDIR)
        raise ArgumentError(f"--out {folder}: {why}")
    return folder


def _refuse_options(ctx: typer.Context) -> None:
    """Raise ArgumentError for options in front of a verb, which has its own."""
    for parameter in ctx.command.params:
        source = ctx.get_parameter_source(parameter.name or "")
        if source is not None and source.name == "COMMANDLINE":  # the home of click's enum varies with typer's version
            verb = ctx.invoked_subcommand
            raise ArgumentError(f"{parameter.opts[0]} comes before {verb}: pass {verb}'s own options after it")


def _as_host(spec: Spec, output: Output) -> None:
    """Run the emulation on a host that torchrun started."""
    from penstock.network.fabric.emulation.host import run

    if os.environ["RANK"] != "0":
        run(spec, output.folder)
        return
    try:
        with _progress(spec.trials, quiet=output.as_json) as watch:
            run(spec, output.folder, watch)
    finally:
        if (output.folder / RUN).exists():
            report(output)


@contextmanager
def _progress(trials: int, *, quiet: bool) -> Iterator[Watch | None]:
    """Show a progress bar on stderr, if that is a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None  # a disabled bar prints an empty line with rich 13
        return
    columns = BarColumn(bar_width=None), TextColumn("trial {task.completed} of {task.total}"), TimeRemainingColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=trials)
        yield lambda number: bar.update(task, completed=number + 1)


# -- the traffic of a dry run -----------------------------------------------------------------------------------------

_NOTE = (
    "Buffers: a rank's largest buffer, as in nccl-tests{}. Busiest port: bytes that the algorithm sends through the "
    "busiest port of a host, out or in."
)
_UNEVEN = "; for an uneven all_to_all, of each rank's input"


def _dry_run(spec: Spec, machines: Machines | None, out: Path | None, *, chakra: bool, as_json: bool) -> None:
    """Check the options as a run does, and show its transfers, a row per group (all microbatches and replicas; in a
    table also similar layers). Write nothing but requested traces."""
    if machines is not None:
        machines.check_support()
    workload, folder, files = spec.workload, _folder(out), list[str]()
    if chakra:
        from penstock.network.fabric.chakra import write_chakra

        files = [path.name for path in write_chakra(workload, folder, spec.hosts)]
    is_named = chakra or out is not None
    if as_json:
        output = {"folder": str(folder) if is_named else None, "files": files}
        print_json({**planned_traffic(spec, groups(workload)), **output})
        return
    console, planned = screen(), planned_traffic(spec, group_similar_layers(workload))
    rows, times = planned["transfers"], len(workload.transfers) * spec.iterations
    console.print(Text(f"{workload.name}: transfers of a trial on {spec.hosts} hosts", "bold"))
    console.print()
    lines = table("transfer", "buffer\nbytes", "times", "buffers\ntotal", "busiest\nport")
    for section in dict.fromkeys(map(_section, rows)):
        lines.add_row(Text(section, "italic"))
        for row in (row for row in rows if _section(row) == section):
            numbers = (row["bytes"], row["times"], row["bytes"] * row["times"], row["port_bytes"])
            lines.add_row(Text(row["name"]), *map(_number, numbers))
        lines.add_row()
    total = times, sum(row["bytes"] * row["times"] for row in rows), planned["port_bytes"]
    lines.add_row("step", "", *map(_number, total), style="bold")
    print_unbroken(console, lines)
    console.print()
    uneven = _UNEVEN if any(transfer.shares for transfer in workload.transfers) else ""
    for note in (*workload.notes, _NOTE.format(uneven)):
        console.print(Text(note, "dim"))
    if is_named:
        note = f"written: {', '.join(files)}" if files else "a run would be written there"
        console.print(Text(f"{folder}: {note}", "dim"))


def _section(row: dict[str, Any]) -> str:
    """Return the heading of a row's section: kind, collective and algorithm."""
    by = "torch.distributed's own" if row["algorithm"] == ENGINE else row["algorithm"]
    operation = "send" if row["collective"] == "send" else f"{by} {row['collective']} among {row['ranks']}"
    uneven = f", shares {','.join(map(str, row['shares']))}" if row["shares"] else ""
    return f"{row['kind']}: {operation}{uneven}" if row["kind"] else f"{operation}{uneven}"


def _number(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
