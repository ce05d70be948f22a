"""Replay: 8 GPUs, 128 microbatches: plain 1F1B, and a vocabulary spread over all ranks in three ways."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from result import DATA, Result, summed

from penstock.schedule import generate
from penstock.simulate import LinkCost, StageCost, simulate

ADAM_BYTES, HBM_BYTES_PER_SECOND = 34, 2.0e12
"""What mixed-precision Adam reads and writes for a parameter, and an A100's peak bandwidth: an optimizer's estimate."""

EMBEDDING = ("embedding_forward_us", "embedding_backward_us")


def vocabulary() -> list[Result]:
    """8 GPUs, 128 microbatches: plain 1F1B, and with a vocabulary pass of every microbatch on every rank."""
    plain, other = (json.loads((DATA / f"vocab_{name}.json").read_text()) for name in ("1f1b", "other"))
    message = {
        setting: statistics.fmean(row["round_trip_us"] for row in other if row["setting"] == setting) / 2e6
        for setting in {row["setting"] for row in other}
    }
    found = []
    for method, rows in (("plain 1F1B", plain), *by_method(other)):
        name, aim = f"vocabulary, {method}", "MAPE 0.7, worst 1.4" if rows is plain else "MAPE 1"
        theirs = f"closed form {summed(closed_form(row) / measured(row) - 1 for row in rows)}"
        ways = [("half a round trip as latency", False), ("sends block", True)]
        passes = "" if rows is plain else "part of the backward, "
        seconds = [[replayed(row, message[row["setting"]], block=block) for row in rows] for _, block in ways]
        ways_seconds = [*zip([how for how, _ in ways], seconds, strict=True)]
        with_optimizer = [one + optimizer(row) for one, row in zip(seconds[-1], rows, strict=True)]
        for how, times in (*ways_seconds, ("sends block, optimizer from specs", with_optimizer)):
            errors = tuple(one / measured(row) - 1 for one, row in zip(times, rows, strict=True))
            found.append(Result(f"{name}: {passes}{how}", "step", errors, theirs, aim))
    return found


def by_method(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    methods = sorted({row["method"] for row in rows})
    return [(method, [row for row in rows if row["method"] == method]) for method in methods]


def stage_seconds(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """F and B of each stage. A vocabulary pass, which the plain schedule does not have, counts as part of B."""
    none = [0] * row["ranks"]
    embedding = (row.get(name, none) for name in EMBEDDING)
    columns = zip(row["forward_us"], row["backward_us"], *embedding, row.get("vocab_us", none), strict=True)
    return [((f + e) / 1e6, (b + g + v) / 1e6) for f, b, e, g, v in columns]


def replayed(row: Mapping[str, Any], message_seconds: float, *, block: bool) -> float:
    """How long the step takes.

    Args:
        block: a rank that sends waits until the message has arrived, as in the traces.
    """
    ranks, sent = row["ranks"], message_seconds if block else 0.0
    work = enumerate(stage_seconds(row))
    costs = [StageCost(f + sent * (rank < ranks - 1), b + sent * (rank > 0), 0) for rank, (f, b) in work]
    link = LinkCost(0.0 if block else message_seconds)
    return simulate(generate("1f1b", ranks, row["microbatches"]), costs, link).makespan_seconds


def closed_form(row: Mapping[str, Any]) -> float:
    """(m - 1) max(F + B) + sum(F + B)."""
    both = [f + b for f, b in stage_seconds(row)]
    return (row["microbatches"] - 1) * max(both) + sum(both)


def optimizer(row: Mapping[str, Any]) -> float:
    """The slowest stage's step of Adam, at the bandwidth of the memory."""
    layers = [12 * row["hidden"] ** 2 * count for count in row["layers_per_stage"]]
    vocabulary = row["vocab"] * row["hidden"]
    if "vocab_us" in row:
        layers = [size + 2 * vocabulary // row["ranks"] for size in layers]
    else:
        layers[0], layers[-1] = layers[0] + vocabulary, layers[-1] + vocabulary
    return max(layers) * ADAM_BYTES / HBM_BYTES_PER_SECOND


def measured(row: Mapping[str, Any]) -> float:
    return float(row["step_ms"]) / 1000
