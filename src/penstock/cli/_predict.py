"""`penstock fabric predict`: uses a run to predict other sizes, and more hosts than there are."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock._base.words import counted
from penstock.cli._options import Json, integers, option
from penstock.network.fabric.steps import Collective
from penstock.network.fabric.views.facts import rate_of
from penstock.network.fabric.views.numbers import digits, seconds
from penstock.network.quantities import size_text, sizes_of
from penstock.report.text import table


def predict(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A run's folder.")],
    hosts: Annotated[str | None, option("Numbers of hosts to predict for: 4,8,64; default 2,4,8,...,4096.")] = None,
    sizes: Annotated[str | None, option("Sizes to predict for: 64KiB,1MiB; default the run's.")] = None,
    collective: Annotated[Collective | None, option("The collective to predict; default each of the run's.")] = None,
    as_json: Json = False,
) -> None:
    """Predict each algorithm's time on more hosts, with an alpha-beta model of the network that a run measured.

    alpha and beta are fitted to the run's median times if the run has at least
    three sizes of a collective; otherwise they come from the links it measured.
    The prediction assumes that every host has such a link of its own, and that
    the network between the links is never the limit.
    """
    from penstock.network.fabric.forecast import HOSTS, forecast
    from penstock.network.fabric.results import results
    from penstock.network.fabric.samples import Run

    numbers = HOSTS if hosts is None else integers("--hosts", hosts)
    asked = None if sizes is None else sizes_of(sizes)
    run = Run.read(folder)
    found = results(run)
    kinds = [collective] if collective else dict.fromkeys(one["collective"] for one in found["transfers"])
    made = [forecast(run.record, found, kind, asked or _sizes(found, kind), numbers) for kind in kinds]
    if as_json:
        about = {key: found[key] for key in ("workload", "hosts", "trials", "complete", "missing", "cpu")}
        print(json.dumps({"version": 1, **about, "collectives": made}))
    else:
        _show(made, found, Console(highlight=False))


def _sizes(found: dict[str, Any], collective: str) -> list[int]:
    """The run's sizes for that collective; all of the run's sizes if it has none."""
    own = {one["bytes"] for one in found["transfers"] if one["collective"] == collective}
    return sorted(own or {one["bytes"] for one in found["transfers"]})


# -- in a terminal ----------------------------------------------------------------------------------------------------


def _show(made: Iterable[dict[str, Any]], found: dict[str, Any], console: Console) -> None:
    console.print(
        Text(f"{found['workload']}: {found['hosts']} hosts, {counted(found['trials'], 'trial')}", "bold"),
        soft_wrap=True,
    )
    for line in _warnings(found):
        console.print(Text(f"warning: {line}", "bold yellow"), soft_wrap=True)
    for one in made:
        console.print()
        _show_fit(one["fit"], console)
        for size in dict.fromkeys(row["bytes"] for row in one["predictions"]):
            console.print()
            console.print(_predicted([row for row in one["predictions"] if row["bytes"] == size]))
        console.print()
        console.print(Text("fastest, by size", "bold"))
        for row in one["crossovers"]:
            console.print(Text(f"  {row['hosts']:>5,} hosts  {_ranges(row['from'])}"), soft_wrap=True)
    console.print()
    console.print(Text(_NOTE, "dim"))


_NOTE = (
    "Predicted: rounds x alpha + bytes on the busiest port x beta. Each host has its own link, the network between "
    "them is never the bottleneck, and adding costs nothing. *: the fastest, whose busbw is shown. Off: how much "
    "longer than the fit a size took."
)


def _warnings(found: dict[str, Any]) -> list[str]:
    lines = []
    if not found["complete"]:
        lines.append(f"the run is not complete; missing: {found['missing'] or 'its end'}")
    if found["cpu"]["saturated"]:
        lines.append(f"processors: {found['cpu']['text']}; the fit describes this machine, and predicts no network")
    return lines


def _show_fit(fit: dict[str, Any], console: Console) -> None:
    alpha, rate = seconds(fit["alpha_seconds"]), rate_of(fit["bytes_per_second"])
    console.print(Text(f"{fit['collective']}: alpha {alpha} a step, 1/beta {rate}", "bold"), soft_wrap=True)
    form = fit["form"]
    line = f"those of the slowest measured link: {fit['lack']}"
    if fit["source"] == "times":
        by = "torch.distributed's own as if it were " if fit["algorithm"] != form else ""
        line = f"fitted to {by}{form}, r2 {fit['r2']:.3f}, at most {fit['largest_residual']:.1%} off"
    console.print(Text(line), soft_wrap=True)
    if fit["held_to_links"]:
        console.print(Text("1/beta is limited to the measured links: the times alone would give more than they carry"))
    if fit["sizes"]:
        made = table("bytes", "measured", form, "off", left=0)
        for one in fit["sizes"]:
            cells = (seconds(one["measured_s"]), seconds(one["fitted_s"]), f"{one['residual']:+.1%}")
            made.add_row(f"{one['bytes']:,}", *cells)
        console.print(made)


def _predicted(rows: Sequence[dict[str, Any]]) -> Table:
    """The table for one size, with a row per number of hosts."""
    names = list(rows[0]["seconds"])
    heads = (name.replace("-", "-\n") for name in names)
    made = table(size_text(int(rows[0]["bytes"])), *heads, "busbw\nMB/s", left=0)
    for row in rows:
        times = [seconds(row["seconds"][name]) + ("*" if name == row["best"] else " ") for name in names]
        made.add_row(f"{row['hosts']:,} hosts", *times, digits(row["busbw_GBps"] and row["busbw_GBps"] * 1e3))
    return made


def _ranges(changes: Sequence[dict[str, Any]]) -> str:
    """The fastest algorithms by size, such as "ring to 3.2 KiB, then tree"."""
    ends = [f" to {_about(one['bytes'])}" for one in changes[1:]]
    return ", then ".join(one["algorithm"] + end for one, end in zip(changes, [*ends, ""], strict=True))


def _about(size: float) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:,.3g} {unit}"
    return f"{size:.3g} B"
