"""Tests of whether runs differ: the statistics are scipy's, and a run does not differ from itself."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
import scipy  # loads its parts when they are asked for
from drawn_runs import record_of, run_of, series
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.network.fabric.compare import (
    MIN_SAMPLES,
    Samples,
    compare,
    holm,
    kolmogorov_smirnov,
    mann_whitney,
    shift,
    tails,
)
from penstock.network.fabric.samples import Run
from penstock.network.fabric.workload import Transfer

some = st.lists(st.integers(1, 12).map(float), min_size=8, max_size=40).map(np.array)
"""With ties."""


@given(some, some)
def test_mann_whitney_is_scipys(a: Samples, b: Samples) -> None:
    found = mann_whitney(a, b)
    if len(set(a) | set(b)) == 1:
        assert found == 1
        return
    other = scipy.stats.mannwhitneyu(a, b, method="asymptotic")
    assert found == pytest.approx(other.pvalue, rel=1e-9, abs=1e-15)


@pytest.mark.parametrize(("seed", "moved"), [(0, 0.0), (1, 0.3), (2, 0.6)])
def test_kolmogorov_smirnov_and_tails_are_scipys(seed: int, moved: float) -> None:
    draw = np.random.default_rng(seed)
    a, b = draw.normal(0, 1, 180), draw.normal(moved, 1, 220)
    exact = scipy.stats.ks_2samp(a, b, method="exact").pvalue
    assert kolmogorov_smirnov(a, b) == pytest.approx(exact, rel=0.25, abs=0.03)
    a[: 20 * seed : 20], b[:140:20] = 10, 10  # the slow ones, none of which follows another
    fisher = scipy.stats.fisher_exact([[seed, 7], [180 - seed, 213]]).pvalue
    assert tails(a, b, 1 - (seed + 7 - 0.5) / 399) == pytest.approx(fisher), "above a threshold just below them"


@given(some, some)
def test_the_shift_is_the_median_of_all_differences(a: Samples, b: Samples) -> None:
    middle, (low, high) = shift(a, b)
    differences = np.sort((b[:, None] - a[None, :]).ravel())
    assert middle == pytest.approx(np.median(differences), abs=1e-9)
    assert low <= middle <= high
    for end in (low, high):
        assert np.abs(differences - end).min() < 1e-9


def test_the_interval_of_a_shift_holds_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    hits = 0
    for _ in range(400):
        _, (low, high) = shift(draw.exponential(1, 30), draw.exponential(1, 40) + 0.3)
        hits += low <= 0.3 <= high
    assert 0.92 <= hits / 400 <= 0.985


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holm_in_its_own_words(ps: list[float]) -> None:
    """A p is below a level exactly if stepping down from the smallest gets to it."""
    corrected = holm(ps)
    for level in (0.01, 0.05, 0.3):
        refused, order = set(), sorted(range(len(ps)), key=lambda one: ps[one])
        for place, index in enumerate(order):
            if ps[index] * (len(ps) - place) >= level:
                break
            refused.add(index)
        assert {index for index, p in enumerate(corrected) if p < level} == refused


# -- runs -------------------------------------------------------------------------------------------------------------


def drawn(seed: int, trials: int = 300, factors: tuple[float, ...] = (1, 1, 1)) -> Run:
    draw = np.random.default_rng(seed)
    return run_of(1e-3 * np.array(factors) * draw.lognormal(0, 0.1, (trials, len(factors))))


def test_a_transfer_that_is_slower_is_found_and_the_others_are_not() -> None:
    found = compare(drawn(1), drawn(2, factors=(1, 1.05, 1)))
    assert [one["verdict"] for one in found["transfers"]] == ["no difference shown", "differs", "no difference shown"]
    slower = found["transfers"][1]
    assert "median" in slower["differs_in"]
    assert slower["ratio"] == pytest.approx(1.05, abs=0.02)
    low, high = slower["ratio_interval"] or (0, 0)
    assert low < 1.05 < high
    assert found["differs"]
    assert found["other_settings"] == {}
    json.dumps(found, allow_nan=False)


def correlated(seed: int) -> Run:
    """A queue that fills and empties slowly."""
    return run_of(1e-3 * np.exp(0.05 * series(np.random.default_rng(seed), 600, 0.9))[:, None])


def test_trials_that_depend_on_each_other_make_no_difference() -> None:
    runs = [(correlated(2 * seed), correlated(2 * seed + 1)) for seed in range(40)]
    naive = 0
    for a, b in runs:
        series = [(run.end_ns - run.start_ns)[:, 0, 0].astype(float) for run in (a, b)]
        naive += scipy.stats.mannwhitneyu(*series).pvalue < 0.05
    assert naive > 12
    assert sum(compare(a, b)["differs"] for a, b in runs) <= 8


def test_a_tail_alone_is_a_difference() -> None:
    base, tailed = drawn(1, 1000), drawn(2, 1000)
    tailed.end_ns[::40, 0] += 5_000_000
    found = compare(base, tailed)["transfers"][0]
    assert found["differs_in"] == ["tail"]
    assert (found["p_values"]["median"] or 0) > 0.05


def test_a_few_samples_show_nothing() -> None:
    few = compare(drawn(1, MIN_SAMPLES - 1), drawn(2, 300))
    assert {one["verdict"] for one in few["transfers"]} == {"too few samples"}
    assert few["transfers"][0]["ratio"] is None
    assert few["transfers"][0]["p_values"] == {"median": None, "shape": None, "tail": None}
    enough = compare(drawn(1, MIN_SAMPLES), drawn(2, MIN_SAMPLES, factors=(9, 1, 1)))
    assert enough["transfers"][0]["verdict"] == "differs"
    assert enough["transfers"][0]["p_values"]["tail"] is None


def test_the_step_is_compared_where_all_of_it_is_the_same() -> None:
    found = compare(drawn(1), drawn(2, factors=(2, 2, 2)))
    assert found["step"] is not None
    assert found["step"]["verdict"] == "differs"
    assert found["step"]["ratio"] == pytest.approx(2, rel=0.05)
    fewer = run_of(np.full((9, 3), 1e-3), hosts=3)
    assert (other := compare(drawn(1), fewer))["step"] is None, "a step of other hosts is another one"
    assert other["other_settings"] == {"hosts": (4, 3)}
    part = compare(drawn(1), drawn(2, factors=(1, 1)))
    assert part["step"] is None
    assert part["only_in_a"] == ["t2"]
    assert part["only_in_b"] == []
    assert len(part["transfers"]) == 2


@pytest.mark.parametrize(
    ("setting", "where", "value"),
    [
        ("dtype", "workload", "int32"), ("op", "workload", "max"), ("iterations", "record", 10),
        ("warmup", "record", 50), ("backend", "record", "nccl"), ("overlap", "record", True),
        ("background", "network", ["300mbit to 1"]), ("slow", "network", {"1": 0.1}),
        ("own", "network", {"1": "10mbit"}), ("shaper", "network", "netem"), ("mtu", "network", 9000),
        ("shares", "transfer", [5, 1, 1, 1]), ("ranks", "transfer", [0, 1]), ("compute_seconds", "transfer", 0.5),
    ],
)  # fmt: skip
def test_what_was_asked_for_is_a_setting(setting: str, where: str, value: Any) -> None:
    def run() -> Run:
        shared = setting == "shares"
        transfers = (Transfer("t0", 1000, "all_to_all", ranks=(0, 1, 2, 3)) if shared else Transfer("t0", 1000),)
        return run_of(np.full((9, 1), 1e-3), transfers, network={"shaper": "switch", "slow": {}}, warmup=5)

    one, other = run(), run()
    assert compare(one, other)["other_settings"] == {}
    entries = asdict(other.record)
    places = {"record": entries, "network": entries["network"], "workload": entries["workload"]}
    places["transfer"] = entries["workload"]["transfers"][0]
    before, places[where][setting] = places[where].get(setting), value
    other = Run(record_of(**entries), other.start_ns, other.end_ns)
    usual = {"op": "sum", "iterations": 1, "warmup": 5, "shaper": "switch", "compute_seconds": 0.0}
    usual = (usual | {"backend": "", "overlap": False}).get(setting)
    name = f"{setting} of t0" if setting in ("shares", "ranks") else setting
    assert compare(one, other)["other_settings"] == {name: (usual, value)}, f"it was {before}"


@pytest.mark.parametrize("transfer", [Transfer("t0", 2000), Transfer("x", 1000), Transfer("t0", 1000, "broadcast")])
def test_runs_with_nothing_in_common_are_refused(transfer: Transfer) -> None:
    with pytest.raises(ArgumentError, match="no transfer in common: A has t0 of 1000 bytes"):
        compare(run_of([[1e-3]] * 9), run_of([[1e-3]] * 9, (transfer,)))
