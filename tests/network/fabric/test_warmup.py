"""When a warm-up is over: soon where times are steady, and not before they are."""

from __future__ import annotations

import fabric_jobs as jobs
import numpy as np
import pytest
from drawn_runs import series
from made_runs import made_run

from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.results import results
from penstock.network.fabric.statistics import WarmUp
from penstock.network.fabric.views.wording import warnings
from penstock.network.fabric.workload import Workload
from scaffolding.ranks import Ranks

REPETITIONS = 60


def _ended(times: np.ndarray, trials: int = 200) -> WarmUp:
    warm = WarmUp(trials)
    for one in times:
        warm.add([float(one)])
        if warm.is_over:
            break
    return warm


@pytest.mark.parametrize("correlation", [0.0, 0.5, 0.9])
def test_steady_times_end_a_warm_up_soon(correlation: float) -> None:
    draw = np.random.default_rng(0)
    ended = [_ended(np.exp(0.1 * series(draw, 400, correlation))) for _ in range(REPETITIONS)]
    assert np.median([warm.count for warm in ended]) <= 35
    assert np.quantile([warm.count for warm in ended], 0.9) <= 70
    assert sum(not warm.is_steady for warm in ended) <= 0.02 * REPETITIONS


@pytest.mark.parametrize(
    ("excess", "trials", "left"), [(1.0, 3, 0.01), (1.0, 10, 0.02), (1.0, 30, 0.15), (10.0, 10, 0.02), (-0.5, 10, 0.02)]
)
def test_times_that_settle_are_waited_for(excess: float, trials: float, left: float) -> None:
    """By a tenth of noise; what is left of the excess when it is over, in nine of ten runs."""
    draw = np.random.default_rng(0)
    found = []
    for _ in range(REPETITIONS):
        times = (1 + excess * np.exp(-np.arange(400) / trials)) * np.exp(0.1 * draw.standard_normal(400))
        found.append(abs(excess) * np.exp(-_ended(times).count / trials))
    assert np.quantile(found, 0.9) <= left


@pytest.mark.parametrize(("trials", "most"), [(1, 6), (10, 10), (50, 50), (10_000, 200)])
def test_times_that_never_settle_are_given_up_and_told(trials: int, most: int) -> None:
    warm = _ended(1.1 ** np.arange(400), trials)
    assert warm.count == most
    assert not warm.is_steady
    run = made_run(20, steady=False, warmup=most + 3)
    assert any(
        f"times were still changing after {most + 3} trials of warm-up" in line for line in warnings(run, results(run))
    )
    for steady in (True, None):
        run = made_run(20, steady=steady)
        assert not any("warm-up" in line for line in warnings(run, results(run)))


@pytest.mark.distributed
def test_a_run_counts_from_where_times_are_steady(ranks2: Ranks) -> None:
    spec = Spec(Workload.from_sizes([64]), 2, trials=40, measures_links=False)
    first, factor = 0.03, 0.85
    found, runs, counted, steps = ranks2.run(jobs.warmed_up, spec, first, factor)[0]
    assert len(counted) == spec.trials
    assert found["warmup"] > 3 + 20, "of which so many are looked at together"
    assert found["warmup"] == 3 + runs, "beside those that are checked"
    assert first * factor ** (found["warmup"] - 3) < 0.05 * first
    assert steps[0][0] == 0, "the first that counts has the number 0"
    assert max(row[0] for row in steps) < spec.trials
