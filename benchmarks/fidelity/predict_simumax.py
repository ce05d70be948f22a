"""SimuMax's steps on 8 B200. Of each model the run with 4 microbatches is fitted (of the mixture of experts, which we
have no numbers for, that with 8 too), and the others are predicted.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from dataclasses import replace

from result import DATA, Result

from penstock.costs.hardware import DEFAULT_EFFICIENCY, device
from penstock.plan.transformer import (
    ClusterSpec,
    ParallelLayout,
    StepEstimate,
    TrainingConfig,
    predict_step,
    transformer,
)
from penstock.schedule import generate
from penstock.simulate import StageCost, simulate

DENSE, EXPERTS = "llama3-70b", "deepseekv3"
EFFICIENCIES = tuple(0.3 * 1.005**k for k in range(160))

Row = Mapping[str, str]


def rows_of(model: str) -> dict[int, Row]:
    """By the number of microbatches."""
    with (DATA / "simumax_pp.csv").open() as file:
        return {int(row["microbatches"]): row for row in csv.DictReader(file) if row["model"] == model}


def measured(row: Row) -> float:
    return float(row["step_ms"]) / 1000


def step(row: Row, efficiency: float = DEFAULT_EFFICIENCY.matmul_efficiency) -> StepEstimate:
    """Of the dense model: bf16, ZeRO-1, attention in one kernel, nothing recomputed."""
    replicas = int(row["dp"])
    model = transformer(f"{DENSE},layers={row['layers']}")
    job = TrainingConfig(model, int(row["seq"]), int(row["tp"]), flash_attention=True, optimizer_shards=replicas)
    layout = ParallelLayout(replicas, int(row["pp"]), int(row["microbatches"]), int(row["microbatch_size"]))
    return predict_step(
        job, ClusterSpec(device("b200"), replace(DEFAULT_EFFICIENCY, matmul_efficiency=efficiency)), layout
    )


def dense_errors() -> tuple[float, ...]:
    """Of the runs with 8 and 32 microbatches, with the products' efficiency from that with 4."""
    rows = rows_of(DENSE)
    efficiency = min(EFFICIENCIES, key=lambda one: abs(step(rows[4], one).seconds / measured(rows[4]) - 1))
    return tuple(step(rows[m], efficiency).seconds / measured(rows[m]) - 1 for m in (8, 32))


def expert_errors() -> tuple[float, ...]:
    """Of the run with 32 microbatches, with a stage's time and the rest of the step from those with 4 and 8."""
    rows = rows_of(EXPERTS)
    pipelines = {m: simulate(generate("1f1b", 2, m), StageCost(1.0, 1.0, 1.0)).makespan_seconds for m in rows}
    stage = (measured(rows[8]) - measured(rows[4])) / (pipelines[8] - pipelines[4])
    rest = measured(rows[4]) - stage * pipelines[4]
    return ((stage * pipelines[32] + rest) / measured(rows[32]) - 1,)


def simumax() -> list[Result]:
    dense, experts = rows_of(DENSE), rows_of(EXPERTS)

    def theirs(*rows: Row) -> str:
        sizes = [abs(float(row["simumax_error_pct"])) for row in rows]
        return f"SimuMax {sum(sizes) / len(sizes):.2f}, worst {max(sizes):.2f}"

    of_dense, of_experts = (dense[8], dense[32]), (experts[32],)
    return [
        Result(
            "SimuMax, Llama 70B of 12 layers: one constant of m = 4", "step", dense_errors(), theirs(*of_dense), "4"
        ),
        Result("SimuMax, DeepSeek of 4 layers: two of m = 4, 8", "step", expert_errors(), theirs(*of_experts), "4"),
    ]
