"""What a run would send: a trial's transfers and their bytes, as `penstock fabric --dry-run --json` prints them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import cache
from itertools import chain
from typing import Any

from penstock.network.fabric.algorithms import ENGINE, generate
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.steps import StepList, slots_by_port
from penstock.network.fabric.workload import Group


def planned_traffic(spec: Spec, grouped: Iterable[Group]) -> dict[str, Any]:
    """Return a row per group, and the totals. `times` counts all iterations of all transfers in the group; for
    `sent_bytes` and `port_bytes` see `_busiest`."""
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
    about = {"version": 1, "workload": spec.workload.name, "hosts": spec.hosts, "iterations": spec.iterations}
    return {**about, "transfers": rows, **_busiest(spec, range(len(spec.workload.transfers)))}


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
    steps = generate(collective, algorithm, ranks, shares)
    return steps, slots_by_port(chain.from_iterable(steps.rounds))
