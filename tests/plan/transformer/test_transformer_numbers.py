"""A transformer's parameters, work and memory against published figures."""

import json
import re
from pathlib import Path

import pytest

from penstock._base.errors import ArgumentError
from penstock.plan.transformer import NAMED, TrainingConfig, TransformerConfig, transformer
from penstock.plan.transformer.memory import layer_activations, layer_memory
from penstock.plan.transformer.operations import head_work, layer_work

PAPER = json.loads(
    (Path(__file__).parents[3] / "benchmarks/fidelity/data/korthikanti.json").read_text(encoding="utf-8")
)
"""Figures 1 and 7 of Korthikanti et al. 2022."""


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # of the published checkpoints; GPT-3's from 12 l h^2 + 13 l h + (V + s) h + 2 h
        ("gpt2", 124_439_808),
        ("gpt3-175b", 174_604_259_328),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
    ],
)
def test_parameters_are_those_of_the_published_models(name: str, parameters: int) -> None:
    assert transformer(name).parameters == parameters


def job_of(row: dict[str, object], recompute: str | None = None, parallel: bool | None = None) -> TrainingConfig:
    model = TransformerConfig(row["layers"], row["hidden"], row["heads"], 51200)  # type: ignore[arg-type]
    sequence_parallel = row["sequence_parallel"] if parallel is None else parallel
    return TrainingConfig(model, row["seq"], row["tp"], sequence_parallel, recompute or row["recomputation"])  # type: ignore[arg-type]


@pytest.mark.parametrize("row", [row for row in PAPER if row["table"] == "figure1"], ids=lambda row: row["model"])
def test_memory_of_the_first_stage_is_figure_1(row: dict[str, object]) -> None:
    """All layers' activations, as 1F1B's first stage has one microbatch for each stage; more with several chunks."""
    job, (p, v) = job_of(row), (row["pp"], row["stages_a_rank"])
    in_flight = 1 + (p - 1) / (p * v) if v > 1 else 1  # type: ignore[operator]
    activations = row["layers"] * layer_activations(job, row["microbatch_size"]) * in_flight  # type: ignore[operator,arg-type]
    assert activations / 2**30 == pytest.approx(row["activations_gib"], abs=1e-9)
    held = layer_memory(job, 1)
    states = held.parameters + held.gradients + held.optimizer - 18 * job.model.layer_vectors  # which they leave out
    layers = row["layers"] / row["pp"]  # type: ignore[operator]
    assert layers * states / 2**30 == pytest.approx(row["parameters_and_optimizer_gib"], abs=1e-9)


@pytest.mark.parametrize(
    "row", [row for row in PAPER if row["table"] == "figure7"], ids=lambda row: f"{row['model']} {row['recomputation']}"
)
def test_shares_of_activations_are_figure_7(row: dict[str, object]) -> None:
    alone = layer_activations(job_of(row, "none", False), 1)
    share = 100 * layer_activations(job_of(row), 1) / alone
    assert share == pytest.approx(row["activations_pct_of_tp_alone"], abs=0.15)  # read off a chart


@pytest.mark.parametrize("name", sorted(NAMED))
def test_products_are_two_flops_a_parameter_and_token_and_attention(name: str) -> None:
    model, rows, sequence = NAMED[name], 2, 512
    job = TrainingConfig(model, sequence)
    tokens = rows * sequence
    for work, matrices, attention in (
        (layer_work(job, rows, 0), model.layer_matrices, 4 * tokens * sequence * model.hidden_size),
        (head_work(job, rows, 0), model.output, 0),
    ):
        forward, inputs, weights = (
            sum(each.flops * each.count for each in part)
            for part in (work.forward, work.input_gradient, work.weight_gradient)
        )
        assert forward == pytest.approx(2 * tokens * matrices + attention)
        assert inputs == pytest.approx(2 * tokens * matrices + 2 * attention)
        assert weights == pytest.approx(2 * tokens * matrices)


def test_numbers_may_replace_those_of_a_name() -> None:
    text = "layers=126,hidden=16384,heads=128,kv-heads=8,ffn=53248,vocabulary=128256,style=llama"
    assert transformer(text) == NAMED["llama3-405b"]
    assert transformer("llama3-70b,layers=12") == TransformerConfig(12, 8192, 64, 128256, 8, 28672, style="llama")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("llama3-70", "did you mean 'llama3-70b'?"),
        ("layers=12,hidden=64,heads=4", "vocab_size= is missing"),
        ("layers=12,hidden=64,heads=5,vocabulary=8", "hidden_size=64 cannot be divided into 5 equal parts"),
        ("layers=a", "expected an integer"),
        ("layers=0,hidden=64,heads=4,vocabulary=8", "layers=0: expected an integer from 1 to 1,000"),
        ("depth=3", "'depth=3' is none of layers="),
        ("layers=1,hidden=64,heads=4,vocabulary=8,style=bert", "expected 'gpt' or 'llama'"),
    ],
)
def test_what_is_no_transformer_is_refused(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(said)):
        transformer(text)


def test_a_group_that_does_not_divide_the_heads_is_refused() -> None:
    with pytest.raises(ArgumentError, match="tensor_parallel=5 does not divide num_attention_heads=64"):
        TrainingConfig(NAMED["llama3-70b"], 4096, 5)
