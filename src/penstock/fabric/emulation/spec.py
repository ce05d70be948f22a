"""What to run, as a file that every host reads."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from penstock.errors import ArgumentError
from penstock.fabric.algorithms import ENGINE, algorithms, generate
from penstock.fabric.samples import SPEC
from penstock.fabric.workload import Workload

BACKENDS = ("gloo", "nccl")
"""Of torch.distributed."""

CHECKED = 3
"""Trials of the warm-up whose results are checked, unless a number is given."""


def usual_algorithm(workload: Workload) -> str:
    """Without a wish: the ring, and for collectives that have none, the first of those of the first transfer."""
    kinds = [transfer.collective for transfer in workload.transfers]
    return "ring" if any("ring" in algorithms(kind) for kind in kinds) else algorithms(kinds[0])[0]


_UNEVEN = ("pairwise", "direct")
"""Step lists of all_to_all that take shares."""


def _computes(workload: Workload) -> bool:
    computed = (max((one.compute_seconds, *one.compute_by_rank)) for one in workload.transfers)
    return max(workload.compute_seconds, *computed) > 0


@dataclass(frozen=True, slots=True)
class Spec:
    """A run of penstock fabric.

    Attributes:
        workload: the transfers of a trial.
        hosts: how many.
        algorithm: of the step lists, for every collective that knows it; others take their first. "engine": the
            backend's own.
        trials: how many are measured.
        warmup: how many go before them, checked for right results; None: `CHECKED`, and then as many as it takes until
            times are steady.
        iterations: how often each transfer is done in a row within a trial, as nccl-tests does it; times are of one.
        overlap: communication goes on while the next layer is computed, one transfer after the other.
        seed: of the payload.
        join_seconds: in which every host has to be there.
        stall_seconds: after which a wait for another host is given up.
        backend: one of `BACKENDS`.
        measures_links: whether pairs of neighbours are measured before the trials.
        link: of the hosts, as it was asked for.
        network: what `Machines.described` says about the hosts' network; None: they have their own.

    Raises:
        ArgumentError: a number is out of range, the workload needs other hosts, or no collective knows the algorithm.
    """

    workload: Workload
    hosts: int
    algorithm: str = "ring"
    trials: int = 200
    warmup: int | None = None
    overlap: bool = False
    iterations: int = 1
    seed: int = 0
    join_seconds: float = 120.0
    stall_seconds: float = 120.0
    backend: str = "gloo"
    measures_links: bool = True
    link: str | None = None
    network: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.hosts < 2:
            raise ArgumentError(f"hosts is {self.hosts}: a network has at least 2; give --hosts 4, for example")
        if self.backend not in BACKENDS:
            raise ArgumentError(f"there is no backend {self.backend!r}: give one of {', '.join(BACKENDS)}")
        if self.workload.hosts not in (0, self.hosts):
            raise ArgumentError(
                f"the workload {self.workload.name!r} is made for {self.workload.hosts} hosts, not for {self.hosts}: "
                f"give --hosts {self.workload.hosts}"
            )
        if self.trials < 1:
            raise ArgumentError(f"trials={self.trials}: at least one is needed")
        if self.iterations < 1:
            raise ArgumentError(f"iterations={self.iterations}: at least one is needed")
        if self.iterations > 1 and _computes(self.workload):
            raise ArgumentError(
                f"iterations={self.iterations}: what is done in a row has nothing computed in front of it, and this "
                "workload computes: give --sizes or a sweep, or --compute none"
            )
        if self.warmup is not None and self.warmup < 1:
            raise ArgumentError(f"warmup={self.warmup}: at least one is needed, as results are checked in the warm-up")
        for name in ("join_seconds", "stall_seconds"):
            if not getattr(self, name) > 0:
                raise ArgumentError(f"{name} is {getattr(self, name)}: expected a time above 0")
        shared = [place for place, transfer in enumerate(self.workload.transfers) if transfer.shares]
        if any(self.algorithm_of(place) not in (ENGINE, *_UNEVEN) for place in shared):
            raise ArgumentError(
                f"the algorithm {self.algorithm!r} sends every host the same amount: for an uneven all_to_all give one "
                f"of {', '.join(_UNEVEN)}, {ENGINE}"
            )
        if self.algorithm == ENGINE:
            if self.workload.op == "avg" and self.backend == "gloo":
                raise ArgumentError("gloo has no average of its own: give --algorithm ring, for example, or --op sum")
            return
        kinds = {transfer.collective for transfer in self.workload.transfers}
        if not any(self.algorithm in algorithms(kind) for kind in kinds):
            try:
                generate(min(kinds), self.algorithm, 2)
            except ArgumentError as error:  # says which step lists there are
                raise ArgumentError(f"{error}; {ENGINE} is torch.distributed's own") from None

    @property
    def checked(self) -> int:
        """Trials of the warm-up whose results are checked."""
        return CHECKED if self.warmup is None else self.warmup

    @property
    def meets(self) -> bool:
        """Whether hosts wait for each other between the transfers of a trial."""
        return self.workload.is_by_hand and not _computes(self.workload)

    def algorithm_of(self, place: int) -> str:
        """By which a transfer is done."""
        if self.algorithm == ENGINE:
            return ENGINE
        known = algorithms(self.workload.transfers[place].collective)
        return self.algorithm if self.algorithm in known else known[0]

    def write(self, folder: Path) -> Path:
        """Into the run's folder."""
        path = folder / SPEC
        path.write_text(json.dumps(asdict(self)))
        return path

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote."""
        given: dict[str, Any] = json.loads(path.read_text())
        return cls(**{**given, "workload": Workload.from_dict(given["workload"])})
