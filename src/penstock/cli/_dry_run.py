"""`penstock fabric --dry-run`: what would be sent, with sizes and counts, and nothing else."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from penstock.fabric.grouped import groups

if TYPE_CHECKING:
    from penstock.fabric.emulation.spec import Spec

_WIDE = 1000
"""So that no cell is broken."""


def show_traffic(spec: Spec, *, as_json: bool) -> None:
    """A row for each group of transfers: those of all microbatches and replicas in one."""
    rows = traffic(spec)
    if as_json:
        print(json.dumps({"version": 1, "workload": spec.workload.name, "hosts": spec.hosts, "transfers": rows}))
        return
    console = Console(highlight=False)
    console.print(Text(f"{spec.workload.name}: a trial on {spec.hosts} hosts would send", "bold"), soft_wrap=True)
    made = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", pad_edge=False)
    for head in ("transfer", "carries", "collective", "algorithm"):
        made.add_column(head, no_wrap=True)
    for head in ("among", "bytes", "times", "in all"):
        made.add_column(head, justify="right")
    for row in rows:
        cells = [row["name"], row["kind"], row["collective"], row["algorithm"], str(row["ranks"])]
        made.add_row(*map(Text, [*cells, f"{row['bytes']:,}", f"{row['times']:,}", f"{row['bytes'] * row['times']:,}"]))
    count, whole = sum(row["times"] for row in rows), sum(row["bytes"] * row["times"] for row in rows)
    made.add_row()
    made.add_row(*map(Text, ["step", "", "", "", "", "", f"{count:,}", f"{whole:,}"]), style="bold")
    Console(highlight=False, width=_WIDE).print(made)
    for note in spec.workload.notes:
        console.print(Text(note, "dim"), soft_wrap=True)


def traffic(spec: Spec) -> list[dict[str, Any]]:
    """The rows."""
    made = []
    for group in groups(spec.workload):
        first = spec.workload.transfers[group.places[0]]
        made.append(
            {
                "name": group.name,
                "kind": first.kind,
                "collective": first.collective,
                "algorithm": spec.algorithm_of(group.places[0]),
                "ranks": len(first.ranks) or spec.hosts,
                "bytes": first.bytes,
                "times": len(group.places),
            }
        )
    return made
