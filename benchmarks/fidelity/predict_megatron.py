"""Megatron-LM's steps (Korthikanti et al. 2022, table 5), from the models' numbers, and the memory that it needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from result import DATA, Result

from penstock.costs.hardware import DEFAULT_EFFICIENCY, device
from penstock.plan.transformer import ClusterSpec, ParallelLayout, TrainingConfig, TransformerConfig, predict_step
from penstock.plan.transformer.memory import layer_activations, layer_memory

VOCABULARY = 51200
EFFICIENCIES = tuple(0.68 * 1.01**k for k in range(20))
"""Of products, the one constant that is fitted."""


def rows_of(table: str) -> list[Mapping[str, Any]]:
    every = json.loads((DATA / "korthikanti.json").read_text())
    return [row for row in every if row["table"] == table]


def job_of(row: Mapping[str, Any]) -> TrainingConfig:
    model = TransformerConfig(row["layers"], row["hidden"], row["heads"], VOCABULARY, positions=row["seq"])
    return TrainingConfig(model, row["seq"], row["tp"], row["sequence_parallel"], row["recomputation"], dtype="float16")


def layout_of(row: Mapping[str, Any]) -> ParallelLayout:
    return ParallelLayout(row["dp"], row["pp"], row["microbatches"], row["microbatch_size"], row["stages_a_rank"])


def error(row: Mapping[str, Any], efficiency: float = DEFAULT_EFFICIENCY.matmul_efficiency) -> float:
    """Of the step through the simulator, with interleaved 1F1B where the row has several stages a rank."""
    machine = ClusterSpec(device("a100"), replace(DEFAULT_EFFICIENCY, matmul_efficiency=efficiency))
    return predict_step(job_of(row), machine, layout_of(row)).seconds / row["step_s"] - 1


def fitted(errors: Sequence[Mapping[float, float]]) -> float:
    """The products' efficiency with the least mean error, of rows' errors by efficiency."""
    return min(EFFICIENCIES, key=lambda efficiency: sum(abs(of_row[efficiency]) for of_row in errors))


def table5() -> list[Result]:
    rows = rows_of("table5")
    theirs = f"Calculon {100 * sum(abs(row['calculon_s'] / row['step_s'] - 1) for row in rows) / len(rows):.2f}"
    errors = [{efficiency: error(row, efficiency) for efficiency in EFFICIENCIES} for row in rows]
    common = fitted(errors)
    apart = tuple(row[fitted([other for other in errors if other is not row])] for row in errors)
    return [
        Result("Megatron-LM, table 5: nothing fitted", "step", tuple(map(error, rows)), theirs, "3.5"),
        Result("Megatron-LM, table 5: a constant of all 4", "step", tuple(e[common] for e in errors), theirs, "3.5"),
        Result("Megatron-LM, table 5: each predicted by the other 3", "step", apart, theirs, "3.5"),
    ]


def formulas() -> list[Result]:
    """Figures 1 and 7, which the paper calculated: whether ours are the same formulas."""
    states, activations, shares = [], [], []
    for row in rows_of("figure1"):
        job, held = job_of(row), layer_memory(job_of(row), 1)
        vectors = 18 * job.model.layer_vectors  # which they leave out
        mine = row["layers"] / row["pp"] * (held.parameters + held.gradients + held.optimizer - vectors)
        states.append(mine / 2**30 / row["parameters_and_optimizer_gib"] - 1)
        p, v = row["pp"], row["stages_a_rank"]
        kept = row["layers"] * (1 + (p - 1) / (p * v) if v > 1 else 1) * layer_activations(job, row["microbatch_size"])
        activations.append(kept / 2**30 / row["activations_gib"] - 1)
    for row in rows_of("figure7"):
        alone = layer_activations(replace(job_of(row), recompute="none", sequence_parallel=False), 1)
        shares.append(100 * layer_activations(job_of(row), 1) / alone / row["activations_pct_of_tp_alone"] - 1)
    return [
        Result("Korthikanti, figure 1", "parameters and states", tuple(states), "", "", measured=False),
        Result("Korthikanti, figure 1", "activations", tuple(activations), "", "", measured=False),
        Result("Korthikanti, figure 7 (read off a chart)", "activations", tuple(shares), "", "", measured=False),
    ]
