"""Replay: what is by all signs a model's output, not a measurement."""

from __future__ import annotations

import csv

from result import DATA, Result


def vtrain_single() -> list[Result]:
    """By all signs a model's output: whether the part that grows with the batch has 1F1B's form, (m + p - 1) T.

    T is taken from two batch sizes of the same setting, and predicts all others.
    """
    settings: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    with (DATA / "vtrain_single.csv").open() as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp"))
            microbatches = int(row["global_batch"]) // (int(row["micro_batch"]) * int(row["dp"]))
            settings.setdefault(key, []).append((microbatches, float(row["iteration_ms"])))
    errors = []
    for rows in settings.values():
        (m, one), (n, two), *others = [*sorted(rows), (0, 0.0), (0, 0.0)][: max(2, len(rows))]
        if n > m:
            errors += [(one + (two - one) / (n - m) * (k - m)) / value - 1 for k, value in others if k]
    return [Result("vTrain, one node", "step by a line in m", tuple(errors), "", "", measured=False)]
