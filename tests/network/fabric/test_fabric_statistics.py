"""Percentiles are bounded or None, intervals cover as often as they say, and memory of a live p99 does not grow."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy  # loads its parts when they are asked for
from drawn_runs import series
from hypothesis import given
from hypothesis import strategies as st

from penstock.network.fabric.statistics import (
    PERCENTILES,
    Summary,
    effective_counts,
    mean_interval,
    min_samples,
    outliers,
    quantile_interval,
)
from scaffolding.representatives import long_after

times = st.lists(st.floats(1e-6, 10), min_size=1, max_size=49)


@pytest.mark.parametrize(("q", "count"), [(0.5, 6), (0.9, 36), (0.99, 368), (0.999, 3688)])
def test_how_many_samples_bound_a_percentile(q: float, count: int) -> None:
    assert min_samples(q) == count
    assert quantile_interval(np.arange(count - 1.0), q, count - 1) is None
    low, high = quantile_interval(np.arange(float(count)), q, count) or (0, 0)
    assert 0 <= low < (count - 1) * q < high <= count - 1


@given(st.sampled_from([0.5, 0.9, 0.99, 0.999]), st.integers(0, 4000))
def test_order_statistics_are_the_innermost_that_hold(q: float, more: int) -> None:
    count = min_samples(q) + more
    low, high = quantile_interval(np.arange(1.0, count + 1), q, count) or (0, 0)
    below = scipy.stats.binom(count, q)
    # Each is wrong in 2.5 % of cases at most, and its neighbor further in would be in more.
    assert below.cdf(low - 1) <= 0.025 * (1 + 1e-6)
    assert below.cdf(low) > 0.025 * (1 - 1e-6)
    assert below.sf(high - 1) <= 0.025 * (1 + 1e-6)
    assert below.sf(high - 2) > 0.025 * (1 - 1e-6)


@given(times)
def test_a_summary_is_in_order_and_inside_its_intervals(samples: list[float]) -> None:
    summary = Summary.from_samples(samples)
    figures = summary.figures
    known = [value for name, value in figures.items() if name != "mean" and value is not None]
    assert known == sorted(known)
    assert set(figures) == {"min", "p50", "p90", "p99", "p999", "max", "mean"}
    assert (figures["min"], figures["max"]) == (min(samples), max(samples))
    for name, q in PERCENTILES.items():
        interval, value = summary.intervals[name], figures[name]
        assert (interval is None) == (value is None) == (len(samples) < min_samples(q))
        if interval is not None and value is not None:
            assert interval[0] <= value <= interval[1]
            assert value == pytest.approx(np.percentile(samples, 100 * q))


def test_of_nothing_nothing_is_known() -> None:
    summary = Summary.from_samples([])
    assert summary.count == 0
    assert set(summary.figures.values()) == {None}
    assert set(summary.intervals) == set(PERCENTILES)
    assert mean_interval([1, 2, 3, 4, 5]) is None


@pytest.mark.parametrize(("sigma", "count", "least"), [(0.2, 20, 0.925), (1.0, 30, 0.895)])
def test_the_mean_is_where_the_interval_says(sigma: float, count: int, least: float) -> None:
    draw = np.random.default_rng(1)
    mean, hits, plain = math.exp(sigma**2 / 2), 0, 0
    for _ in range(1000):
        samples = draw.lognormal(0, sigma, count)
        low, high = mean_interval(samples) or (0, 0)
        hits += low <= mean <= high
        t = scipy.stats.t(count - 1, samples.mean(), samples.std(ddof=1) / math.sqrt(count)).interval(0.95)
        plain += t[0] <= mean <= t[1]
    assert hits >= least * 1000
    assert hits >= plain - 10  # Student's t alone is never better, and of skewed samples worse


# -- trials that depend on each other ---------------------------------------------------------------------------------

HEAVY = {"lognormal": (np.exp, math.exp(0.5)), "pareto": (lambda x: scipy.stats.norm.sf(x) ** (-1 / 3), 1.5)}
"""From a normal variable to one with a heavy tail, and its mean."""


@pytest.mark.parametrize(
    ("correlation", "count", "kind", "names", "repetitions"),
    long_after(
        2,
        (0.9, 1000, "pareto", ("p50", "p90", "mean"), 1000),
        (0.9, 5000, "lognormal", ("p99",), 400),
        (0.0, 200, "lognormal", ("p50", "p90", "mean"), 1000),
        (0.5, 300, "pareto", ("p50", "p90", "mean"), 1000),
        (0.7, 400, "lognormal", ("p50", "p90", "mean"), 1000),
    ),
)
def test_intervals_cover_what_they_say(
    correlation: float, count: int, kind: str, names: tuple[str, ...], repetitions: int
) -> None:
    heavy, mean = HEAVY[kind]
    draw = np.random.default_rng(3)
    hits: dict[str, list[bool]] = {name: [] for name in names}
    naive = []
    for _ in range(repetitions):
        samples = heavy(series(draw, count, correlation))
        summary = Summary.from_samples(samples)
        for name in names:
            interval = summary.mean_interval if name == "mean" else summary.intervals[name]
            true = mean if name == "mean" else float(heavy(scipy.stats.norm.ppf(PERCENTILES[name])))
            if interval is not None:
                hits[name].append(interval[0] <= true <= interval[1])
        low, high = quantile_interval(np.sort(samples), 0.5, count) or (1, 0)
        naive.append(low <= float(heavy(0.0)) <= high)
    for name, found in hits.items():
        assert len(found) >= 0.9 * repetitions, name
        assert 0.93 <= np.mean(found) <= 0.97, (name, np.mean(found))
    if correlation == 0.9:
        assert np.mean(naive) < 0.6, "as if they were independent, they would cover half as often"


def test_dependent_trials_count_for_fewer() -> None:
    draw = np.random.default_rng(4)
    assert effective_counts(draw.standard_normal(400), (0.5, 0.99)) == (400, 400)
    middle, tail = effective_counts(series(draw, 2000, 0.9), (0.5, 0.99))
    assert 2000 / 25 < middle < 2000 / 10
    assert middle < tail < 2000 / 4, "what is in the tail forgets sooner"
    dependent = Summary.from_samples(series(draw, 400, 0.9))
    assert dependent.effective < 40
    assert dependent.figures["p99"] is None, "as with fewer than 368 independent ones"
    assert Summary.from_samples(np.linspace(0, 1, 400)).p50 is None, "a drift has no middle"


def test_outliers_are_those_far_above_the_others() -> None:
    samples = np.random.default_rng(0).normal(1, 0.01, 500)
    samples[[7, 300]] = 2, 1.5
    samples[100] = 0.5  # fast ones are none
    assert list(outliers(samples)) == [7, 300]
    calm = 1 + 0.01 * scipy.stats.norm.ppf((np.arange(500) + 0.5) / 500)
    assert list(outliers([*calm, 1.07, 1.09])) == [501], "eight standard deviations above"
    assert list(outliers([1.0] * 200 + [9.0])) == [200]
    assert list(outliers([1.0] * 9)) == []
    assert list(outliers([])) == []


def test_the_mean_of_times_is_not_below_0() -> None:
    """Of twenty skews, one of which a host overslept: the interval of the mean would begin at less than none."""
    skews = np.array([*np.full(19, 1e-3), 1.0])
    assert (mean_interval(skews) or (1, 1))[0] < 0
    found = Summary.from_samples(skews).mean_interval
    assert found is not None
    assert found[0] == 0 < skews.mean() < found[1]
    assert Summary.from_samples(-skews).mean_interval == mean_interval(-skews), "what may be negative is not cut off"
