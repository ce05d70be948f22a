"""Subcommands of `penstock fabric` for recorded runs (show, compare, predict), and cleanup."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.text import Text

from penstock._base.errors import ArgumentError
from penstock._base.files import write_json
from penstock.cli._options import JSON, REQUIRED, RUN, argument, integers, option, print_json, screen
from penstock.network.fabric.steps import Collective
from penstock.network.fabric.views import nccl
from penstock.network.fabric.views.numbers import digits, seconds
from penstock.network.fabric.views.wording import format_rate
from penstock.network.quantities import parse_sizes, size_text
from penstock.report.text import print_columns

if TYPE_CHECKING:
    from penstock.network.fabric.samples import Run


@dataclass(frozen=True, slots=True)
class Output:
    """Directory of a run and its output format; `average`: in nccl-tests' columns."""

    folder: Path
    as_json: bool = False
    chakra: bool = False
    average: nccl.Average | None = None


def prepare() -> None:
    """Import the modules that `report` needs, which takes a second, before a run rather than after a Ctrl-C."""
    fabric = (f"penstock.network.fabric.{name}" for name in ("views.text", "results"))
    for module in (*fabric, "scipy.optimize", "scipy.special", "scipy.stats"):
        import_module(module)


def report(output: Output, *, page: bool = True) -> None:
    """Read a run, write its results next to it, and show it.

    `page`: also write the page and its figures, which takes a few seconds.
    """
    from penstock.network.fabric.results import results
    from penstock.network.fabric.samples import Run
    from penstock.network.fabric.views.text import show

    folder = output.folder
    run = Run.read(folder)
    summary = results(run)
    files = _write(folder, run, summary, chakra=output.chakra, page=page)
    if output.as_json:
        print_json(summary)
    elif output.average is not None:
        print(nccl.text(run, summary, output.average))
    else:
        console = screen()
        show(run, summary, console)
        console.print(f"\n{folder}: samples.csv, {', '.join(files)}", style="dim", soft_wrap=True)
        if len(run.start_ns) and not page:
            console.print(f"`penstock fabric show {folder}` makes report.html", style="dim", soft_wrap=True)


def _write(folder: Path, run: Run, summary: dict[str, Any], *, chakra: bool, page: bool) -> list[str]:
    """Write the results of a run to its directory and return the names of the files."""
    from penstock.network.fabric.alpha_beta import links_json

    files = ["results.json"]
    write_json(folder / "results.json", summary)
    if (links := links_json(run.record, summary["model"])) is not None:
        write_json(folder / "links.json", links)
        files.append("links.json")
    if len(run.start_ns) and page:
        from penstock.network.fabric.views.page import write_page

        write_page(run, summary, folder / "report.html")
        files.append("report.html")
    if chakra:
        from penstock.network.fabric.chakra import write_chakra

        files += [path.name for path in write_chakra(run.record.workload, folder, run.record.hosts)]
    return files


def show_run(
    folder: Path = RUN,
    as_nccl: bool = option("Print as nccl-tests does.", "--nccl", default=False),
    average: nccl.Average | None = option(
        "With --nccl, average over the ranks: avg (as in nccl-tests), max, min, rank0."
    ),
    chakra: bool = option("Write Chakra traces to FOLDER, one file per rank.", "--chakra", default=False),
    as_json: bool = JSON,
) -> None:
    """Show a recorded run. If it was killed, show its samples until then."""
    if average is not None and not as_nccl:
        raise ArgumentError("--average requires --nccl: other tables show the slowest rank; pass both, or neither")
    if as_nccl and as_json:
        raise ArgumentError("--nccl prints columns, and --json Penstock's own results: pass one of them")
    report(Output(folder, as_json, chakra, (average or "avg") if as_nccl else None))


def compare_runs(
    first: Path = argument("Directory of a run.", metavar="A", default=REQUIRED),
    second: Path = argument("Directory of another run.", metavar="B", default=REQUIRED),
    as_json: bool = JSON,
) -> None:
    """Compare two runs, transfer by transfer, and test whether they differ."""
    from penstock.network.fabric.compare import compare
    from penstock.network.fabric.results import results
    from penstock.network.fabric.samples import Run
    from penstock.network.fabric.views.text import show_comparison
    from penstock.network.fabric.views.wording import warnings

    runs = Run.read(first), Run.read(second)
    comparison = compare(*runs)
    notes = [warnings(run, results(run)) for run in runs]
    if as_json:
        print_json({**comparison, "warnings": dict(zip("ab", notes, strict=True))})
    else:
        show_comparison(comparison, screen(), (str(first), str(second)), notes)


def clean_up(force: bool = option("Also remove those of a running emulation.", "--force", default=False)) -> None:
    """Remove the leftovers of a crashed emulation: namespaces with Penstock's prefix, and nothing else."""
    from penstock.network.machines import clean

    removed = clean(force=force)
    print("\n".join(f"removed {name}" for name in removed) or "nothing to clean up")


# -- predictions ------------------------------------------------------------------------------------------------------

_NOTE = (
    "Predicted: rounds x alpha + bytes on the busiest port x beta, if each host has its own link, the network between "
    "them is never the bottleneck, and adding costs nothing. *: the fastest, whose busbw is shown. Off: measured time "
    "relative to the fit."
)


def predict(
    folder: Path = RUN,
    hosts: str | None = option("Numbers of hosts: 4,8,64; default 2,4,8,...,4096."),
    sizes: str | None = option("Sizes: 64KiB,1MiB; default: those of the run."),
    collective: Collective | None = option("Collective to predict; default: each of the run."),
    as_json: bool = JSON,
) -> None:
    """Predict each algorithm's time on more hosts, with an alpha-beta model of the network that a run measured.

    alpha and beta are fitted to the run's median times if the run has at least
    three sizes of a collective; otherwise they come from the links it measured.
    The prediction assumes that every host has such a link of its own, and that
    the network between the links is never the limit.
    """
    from penstock.network.fabric.alpha_beta import HOSTS, forecast
    from penstock.network.fabric.results import results
    from penstock.network.fabric.samples import Run
    from penstock.network.fabric.views.text import show_head

    numbers = HOSTS if hosts is None else integers("--hosts", hosts)
    requested = None if sizes is None else parse_sizes(sizes)
    run = Run.read(folder)
    summary = results(run)
    transfers = [(transfer["collective"], transfer["bytes"]) for transfer in summary["transfers"]]
    forecasts = []
    for kind in [collective] if collective else dict.fromkeys(name for name, _ in transfers):
        measured = {size for name, size in transfers if name == kind} or {size for _, size in transfers}
        forecasts.append(forecast(run.record, summary, kind, requested or sorted(measured), numbers))
    if as_json:
        about = {key: summary[key] for key in ("workload", "hosts", "trials", "complete", "missing", "cpu")}
        print_json({"version": 1, **about, "collectives": forecasts})
    else:
        console = screen()
        show_head(run, summary, console)
        _show_predictions(forecasts, console)


def _show_predictions(forecasts: Iterable[dict[str, Any]], console: Console) -> None:
    for forecast in forecasts:
        console.print()
        _show_fit(forecast["fit"], console)
        for size in dict.fromkeys(row["bytes"] for row in forecast["predictions"]):
            console.print()
            _show_size(int(size), [row for row in forecast["predictions"] if row["bytes"] == size], console)
        console.print()
        console.print(Text("fastest, by size", "bold"))
        for row in forecast["crossovers"]:
            console.print(Text(f"  {row['hosts']:>5,} hosts  {_ranges(row['from'])}"), soft_wrap=True)
    console.print()
    console.print(Text(_NOTE, "dim"))


def _show_fit(fit: dict[str, Any], console: Console) -> None:
    alpha, rate = seconds(fit["alpha_seconds"]), format_rate(fit["bytes_per_second"])
    console.print(Text(f"{fit['collective']}: alpha {alpha}/step, 1/beta {rate}", "bold"), soft_wrap=True)
    form = fit["form"]
    line = f"from the slowest measured link: {fit['lack']}"
    if fit["source"] == "times":
        by = "torch.distributed's own as if it were " if fit["algorithm"] != form else ""
        line = f"fitted to {by}{form}, r2 {fit['r2']:.3f}, at most {fit['largest_residual']:.1%} off"
    console.print(Text(line), soft_wrap=True)
    if fit["held_to_links"]:
        console.print(Text("1/beta is limited to the measured links: the times alone would exceed their bandwidth"))
    if fit["sizes"]:
        columns = {
            "bytes": [f"{size['bytes']:,}" for size in fit["sizes"]],
            "measured": [seconds(size["measured_s"]) for size in fit["sizes"]],
            form: [seconds(size["fitted_s"]) for size in fit["sizes"]],
            "off": [f"{size['residual']:+.1%}" for size in fit["sizes"]],
        }
        print_columns(console, columns, left=0)


def _show_size(size: int, rows: Sequence[dict[str, Any]], console: Console) -> None:
    """Print the table of one size, with a row per number of hosts."""
    times = {
        name.replace("-", "-\n"): [
            seconds(row["seconds"][name]) + ("*" if name == row["best"] else " ") for row in rows
        ]
        for name in rows[0]["seconds"]
    }
    columns = {
        size_text(size): [f"{row['hosts']:,} hosts" for row in rows],
        **times,
        "busbw\nMB/s": [digits(row["busbw_GBps"] and row["busbw_GBps"] * 1e3) for row in rows],
    }
    print_columns(console, columns, left=0)


def _ranges(changes: Sequence[dict[str, Any]]) -> str:
    """Describe the fastest algorithms by size, as "ring to 3.2 KiB, then tree"."""
    ends = [f" to {_about(change['bytes'])}" for change in changes[1:]]
    return ", then ".join(change["algorithm"] + end for change, end in zip(changes, [*ends, ""], strict=True))


def _about(size: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}"
    return f"{size:.3g} B"
