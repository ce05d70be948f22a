"""The specification of a run, as a file that every host reads; and what a run would send, for a dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, Self

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.files import read_json, validate, write_json
from penstock.network.fabric.algorithms import ENGINE, algorithms, generate
from penstock.network.fabric.samples import SPEC, Settings
from penstock.network.fabric.steps import StepList, slots_by_port
from penstock.network.fabric.workload import Group, Workload

BOARD = "PENSTOCK_START_BOARD"
"""The environment variable that names the file in which host 0 announces trials; it is empty at first."""

CHECKED = 3
"""The default number of warm-up trials whose results are checked."""


def default_algorithm(workload: Workload) -> str:
    """Return the default algorithm: ring if any collective has it; otherwise the first one for the first transfer."""
    kinds = [transfer.collective for transfer in workload.transfers]
    return "ring" if any("ring" in algorithms(kind) for kind in kinds) else algorithms(kinds[0])[0]


_UNEVEN = ("pairwise", "direct")
"""Step lists of all_to_all that support shares."""


@dataclass(frozen=True)
class Spec(Settings):
    """A run of penstock fabric.

    Raises:
        ArgumentError: a number is out of range, the workload needs another number of hosts, or no collective has the
            algorithm.
    """

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise ArgumentError(f"hosts is {self.hosts}: a network has at least 2; pass --hosts 4, for example")
        if self.workload.hosts not in (0, self.hosts):
            raise ArgumentError(
                f"the workload {self.workload.name!r} is made for {self.workload.hosts} hosts, not for {self.hosts}: "
                f"pass --hosts {self.workload.hosts}"
            )
        check_counts(required=False, trials=self.trials, iterations=self.iterations, warmup=self.warmup)
        if self.iterations > 1 and self.workload.computes:
            raise ArgumentError(
                f"iterations={self.iterations}: iterations run back to back, without compute, but this workload "
                "computes: pass --sizes or a sweep, or --compute none"
            )
        for name in ("join_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}: expected a time above 0")
        shared = [index for index, transfer in enumerate(self.workload.transfers) if transfer.shares]
        if any(self.algorithm_for(index) not in (ENGINE, *_UNEVEN) for index in shared):
            raise ArgumentError(
                f"the algorithm {self.algorithm!r} sends every host the same amount: for an uneven all_to_all pass one "
                f"of {', '.join(_UNEVEN)}, {ENGINE}"
            )
        if self.algorithm == ENGINE:
            if self.workload.op == "avg" and self.backend == "gloo":
                raise ArgumentError("gloo cannot average: pass --algorithm ring, for example, or --reduce-op sum")
            return
        kinds = {transfer.collective for transfer in self.workload.transfers}
        if not any(self.algorithm in algorithms(kind) for kind in kinds):
            try:
                generate(min(kinds), self.algorithm, 2)
            except ArgumentError as error:  # the message lists the available step lists
                raise ArgumentError(f"{error}; {ENGINE} is torch.distributed's own") from None

    @property
    def checked_trials(self) -> int:
        """The number of warm-up trials whose results are checked."""
        return CHECKED if self.warmup is None else self.warmup

    def write(self, folder: Path) -> Path:
        """Write the spec into the run's folder and return its path."""
        path = folder / SPEC
        write_json(path, asdict(self))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read what `write` wrote."""
        return validate(cls, read_json(path), str(path))


Watch = Callable[[int], object]
"""Called with the number of each trial that has ended: on host 0, or wherever the hosts are started."""


# -- what a run would send ---------------------------------------------------------------------------------------------


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
