"""`penstock fabric --dry-run`: shows what would be sent, with sizes and counts, and sends nothing."""

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
    "Buffers are nccl-tests' sizes: of a rank's largest buffer{}. Busiest port: all bytes that the algorithm sends "
    "through a host's busiest port, out or in."
)
_UNEVEN = "; of an uneven all_to_all, of what each rank gives"


def show_traffic(spec: Spec, folder: Path | None, files: Sequence[Path], *, as_json: bool) -> None:
    """Prints a row per group of transfers: over all microbatches and replicas and, in a table, over similar layers; and
    the files that were written into the folder that was asked for."""
    workload, written = spec.workload, [path.name for path in files]
    whole = _busiest(spec, range(len(workload.transfers)))
    if as_json:
        about = {"version": 1, "workload": workload.name, "hosts": spec.hosts, "iterations": spec.iterations}
        rows = _traffic(spec, groups(workload))
        where = {"folder": None if folder is None else str(folder), "files": written}
        print_json({**about, "transfers": rows, **whole, **where})
        return
    console = screen()
    console.print(Text(f"{workload.name}: what a trial on {spec.hosts} hosts would send", "bold"))
    console.print()
    rows = _traffic(spec, group_similar_layers(workload))
    made = table("transfer", "buffer\nbytes", "times", "buffers\ntotal", "busiest\nport")
    for section in dict.fromkeys(map(_section, rows)):
        made.add_row(Text(section, "italic"))
        for row in (row for row in rows if _section(row) == section):
            numbers = (row["bytes"], row["times"], row["bytes"] * row["times"], row["port_bytes"])
            made.add_row(Text(row["name"]), *map(_number, numbers))
        made.add_row()
    times, buffers = len(workload.transfers) * spec.iterations, sum(row["bytes"] * row["times"] for row in rows)
    made.add_row("step", "", *map(_number, (times, buffers, whole["port_bytes"])), style="bold")
    print_unbroken(console, made)
    console.print()
    uneven = _UNEVEN if any(one.shares for one in workload.transfers) else ""
    for note in (*workload.notes, _NOTE.format(uneven)):
        console.print(Text(note, "dim"))
    if folder is not None:
        said = f"written: {', '.join(written)}" if files else "a run would be written there"
        console.print(Text(f"{folder}: {said}", "dim"))


def _traffic(spec: Spec, grouped: Iterable[Group]) -> list[dict[str, Any]]:
    """The rows. `times` counts all iterations of all transfers in the group; for the rest see `_busiest`."""
    made = []
    for group in grouped:
        first = spec.workload.transfers[group.places[0]]
        made.append(
            {
                "name": group.name,
                "kind": first.kind,
                "collective": first.collective,
                "algorithm": spec.algorithm_of(group.places[0]),
                "ranks": len(first.ranks) or spec.hosts,
                "shares": list(first.shares),
                "bytes": first.bytes,
                "times": len(group.places) * spec.iterations,
                **_busiest(spec, group.places),
            }
        )
    return made


def _busiest(spec: Spec, places: Iterable[int]) -> dict[str, int | None]:
    """What the host sends that sends most, and what passes the busiest port; None for the engine: nobody knows how."""
    passed: Counter[tuple[int, bool]] = Counter()
    for place in places:
        one, algorithm = spec.workload.transfers[place], spec.algorithm_of(place)
        if algorithm == ENGINE:
            return {"sent_bytes": None, "port_bytes": None}
        ranks = one.members(spec.hosts)
        steps, slots = _steps(one.collective, algorithm, len(ranks), one.shares)
        size = steps.slot_bytes(one.bytes, spec.workload.element_bytes) * spec.iterations
        for (rank, leaves), count in slots.items():
            passed[ranks[rank], leaves] += count * size
    sent = (size for (_, leaves), size in passed.items() if leaves)
    return {"sent_bytes": max(sent, default=0), "port_bytes": max(passed.values(), default=0)}


@cache
def _steps(
    collective: str, algorithm: str, ranks: int, shares: tuple[int, ...]
) -> tuple[StepList, Counter[tuple[int, bool]]]:
    """A collective's steps, and how many pieces of its buffer pass each port."""
    steps = generate(collective, algorithm, ranks, **({"shares": shares} if shares else {}))
    return steps, slots_by_port(chain.from_iterable(steps.rounds))


def _section(row: dict[str, Any]) -> str:
    """The heading of a row's section: what is carried, and how."""
    by = "torch.distributed's own" if row["algorithm"] == ENGINE else row["algorithm"]
    how = "send" if row["collective"] == "send" else f"{by} {row['collective']} among {row['ranks']}"
    uneven = f", shares {','.join(map(str, row['shares']))}" if row["shares"] else ""
    return f"{row['kind']}: {how}{uneven}" if row["kind"] else f"{how}{uneven}"


def _number(value: int | None) -> str:
    return NONE if value is None else f"{value:,}"
