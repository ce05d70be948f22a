"""vTrain's steps on 64 to 512 A100, from the models' numbers: products' efficiency is fitted for each size of model,
the network's share for all of them together. No row that is scored as predicted has a part in its own constants.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cache

from result import DATA, Result

from penstock.costs.hardware import DEFAULT_EFFICIENCY, device
from penstock.plan.transformer import ClusterSpec, ParallelLayout, TrainingConfig, TransformerConfig, predict_step

VOCABULARY = 51200
SHARES = tuple(0.34 * 1.1**k for k in range(6))
"""Of the A100 system's network (eight ports of 200 Gbit/s a host) that the cluster may have."""

EFFICIENCIES = tuple(0.58 * 1.03**k for k in range(13))
"""Of products: both are sought on a grid, which is as fine as the measurements tell."""


@dataclass(frozen=True)
class Run:
    """A measured step."""

    size: str
    job: TrainingConfig
    layout: ParallelLayout
    seconds: float


def runs() -> list[Run]:
    with (DATA / "vtrain_multi.csv").open() as file:
        return [_run(row) for row in csv.DictReader(file)]


def _run(row: Mapping[str, str]) -> Run:
    number = {name: int(value) for name, value in row.items() if name not in ("params_billion", "iteration_ms")}
    model = TransformerConfig(number["layers"], number["hidden"], number["heads"], VOCABULARY, positions=number["seq"])
    job = TrainingConfig(model, number["seq"], number["tp"], recompute="full", dtype="float16")
    microbatches = number["global_batch"] // (number["micro_batch"] * number["dp"])
    layout = ParallelLayout(number["dp"], number["pp"], microbatches, number["micro_batch"])
    return Run(row["params_billion"], job, layout, float(row["iteration_ms"]) / 1000)


def predicted(run: Run, efficiency: float, share: float) -> float:
    """The step through the simulator; everything but the two constants is of specifications and round figures."""
    machine = ClusterSpec(
        device("a100"), replace(DEFAULT_EFFICIENCY, matmul_efficiency=efficiency), network_fraction=share
    )
    return predict_step(run.job, machine, run.layout).seconds


def vtrain_multi() -> list[Result]:
    every = runs()

    @cache
    def error(row: int, efficiency: float, share: float) -> float:
        return predicted(every[row], efficiency, share) / every[row].seconds - 1

    fitted = fit(every, error, range(len(every)))
    within = tuple(error(row, fitted.efficiency[run.size], fitted.share) for row, run in enumerate(every))
    apart = []
    for row, run in enumerate(every):
        without = fit(every, error, [other for other in range(len(every)) if other != row])
        apart.append(error(row, without.efficiency[run.size], without.share))
    constants = f"{len(fitted.efficiency)} efficiencies and the network's share fitted to 49"
    theirs = "vTrain 14.73"
    return [
        Result(f"vTrain, 64 to 512 A100: {constants}", "step", within, theirs, "8"),
        Result("vTrain, 64 to 512 A100: each predicted by the other 48", "step", tuple(apart), theirs, "8"),
    ]


@dataclass(frozen=True)
class Fit:
    """The constants with the least sum of errors' sizes."""

    efficiency: Mapping[str, float]
    share: float


def fit(every: list[Run], error: Callable[[int, float, float], float], rows: Collection[int]) -> Fit:
    sizes = sorted({run.size for run in every}, key=float)
    best = math.inf, Fit({}, 0.0)
    for share in SHARES:
        total, chosen = 0.0, {}
        for size in sizes:
            mine = [row for row in rows if every[row].size == size]

            def loss(efficiency: float, mine: list[int] = mine, share: float = share) -> float:
                return sum(abs(error(row, efficiency, share)) for row in mine)

            chosen[size] = min(EFFICIENCIES, key=loss)
            total += loss(chosen[size])
        best = min(best, (total, Fit(chosen, share)), key=lambda pair: pair[0])
    return best[1]
