"""`penstock fabric --dry-run`: shows the transfers of a run, with sizes and counts, and sends nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from penstock.cli._options import print_json, screen
from penstock.network.fabric.algorithms import ENGINE, generate
from penstock.network.fabric.steps import slots_by_port
from penstock.network.fabric.views.numbers import NONE
from penstock.network.fabric.workload import group_similar_layers, groups
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.network.fabric.emulation.spec import Spec
    from penstock.network.fabric.steps import StepList
    from penstock.network.fabric.workload import Group

_NOTE = (
    "Buffers: a rank's largest buffer, as in nccl-tests{}. Busiest port: bytes that the algorithm sends through the "
    "busiest port of a host, out or in."
)
_UNEVEN = "; for an uneven all_to_all, of each rank's input"


def show_traffic(spec: Spec, folder: Path | None, files: Sequence[Path], *, as_json: bool) -> None:
    """Print one row per group of transfers (all microbatches and replicas; in a table also similar layers), and the
    files written to `folder`."""
    workload, file_names = spec.workload, [path.name for path in files]
    totals = _busiest(spec, range(len(workload.transfers)))
    if as_json:
        about = {"version": 1, "workload": workload.name, "hosts": spec.hosts, "iterations": spec.iterations}
        rows = _traffic(spec, groups(workload))
        output = {"folder": None if folder is None else str(folder), "files": file_names}
        print_json({**about, "transfers": rows, **totals, **output})
        return
    console = screen()
    console.print(Text(f"{workload.name}: transfers of a trial on {spec.hosts} hosts", "bold"))
    console.print()
    rows = _traffic(spec, group_similar_layers(workload))
    lines = table("transfer", "buffer\nbytes", "times", "buffers\ntotal", "busiest\nport")
    for section in dict.fromkeys(map(_section, rows)):
        lines.add_row(Text(section, "italic"))
        for row in (row for row in rows if _section(row) == section):
            numbers = (row["bytes"], row["times"], row["bytes"] * row["times"], row["port_bytes"])
            lines.add_row(Text(row["name"]), *map(_number, numbers))
        lines.add_row()
    times, buffers = len(workload.transfers) * spec.iterations, sum(row["bytes"] * row["times"] for row in rows)
    lines.add_row("step", "", *map(_number, (times, buffers, totals["port_bytes"])), style="bold")
    print_unbroken(console, lines)
    console.print()
    uneven = _UNEVEN if any(transfer.shares for transfer in workload.transfers) else ""
    for note in (*workload.notes, _NOTE.format(uneven)):
        console.print(Text(note, "dim"))
    if folder is not None:
        note = f"written: {', '.join(file_names)}" if files else "a run would be written there"
        console.print(Text(f"{folder}: {note}", "dim"))


def _traffic(spec: Spec, grouped: Iterable[Group]) -> list[dict[str, Any]]:
    """Return the rows. `times` counts all iterations of all transfers in the group; for other values see `_busiest`."""
    rows = []
    for group in grouped:
        first = spec.workload.transfers[group.indices[0]]
        rows.append(
            {
                "name": group.name,
                "kind": first.kind,
                "collective": first.collective,
                "algorithm": spec.algorithm_for(group.indices[0]),
                "ranks": len(first.ranks) or spec.hosts,
                "shares": list(first.shares),
                "bytes": first.bytes,
                "times": len(group.indices) * spec.iterations,
                **_busiest(spec, group.indices),
            }
        )
    return rows


def _busiest(spec: Spec, indices: Iterable[int]) -> dict[str, int | None]:
    """Return the bytes that the busiest host sends and that pass the busiest port; None for the engine: unknown."""
    passed: Counter[tuple[int, bool]] = Counter()
    for index in indices:
        transfer, algorithm = spec.workload.transfers[index], spec.algorithm_for(index)
        if algorithm == ENGINE:
            return {"sent_bytes": None, "port_bytes": None}
        ranks = transfer.members(spec.hosts)
        steps, slots = _steps(transfer.collective, algorithm, len(ranks), transfer.shares)
        size = steps.slot_bytes(transfer.bytes, spec.workload.element_bytes) * spec.iterations
        for (rank, leaves), count in slots.items():
            passed[ranks[rank], leaves] += count * size
    sent = (size for (_, leaves), size in passed.items() if leaves)
    return {"sent_bytes": max(sent, default=0), "port_bytes": max(passed.values(), default=0)}


@cache
def _steps(
    collective: str, algorithm: str, ranks: int, shares: tuple[int, ...]
) -> tuple[StepList, Counter[tuple[int, bool]]]:
    """Return the steps of a collective, and how many pieces of its buffer pass each port."""
    steps = generate(collective, algorithm, ranks, **({"shares": shares} if shares else {}))
    return steps, slots_by_port(chain.from_iterable(steps.rounds))


def _section(row: dict[str, Any]) -> str:
    """Return the heading of a row's section: kind, collective and algorithm."""
    by = "torch.distributed's own" if row["algorithm"] == ENGINE else row["algorithm"]
    operation = "send" if row["collective"] == "send" else f"{by} {row['collective']} among {row['ranks']}"
    uneven = f", shares {','.join(map(str, row['shares']))}" if row["shares"] else ""
    return f"{row['kind']}: {operation}{uneven}" if row["kind"] else f"{operation}{uneven}"


def _number(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
