"""An estimate grows with the work and is never below the peaks; its constants can be found from measured times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ArgumentError
from penstock.costs.hardware import (
    DEFAULT_EFFICIENCY,
    Efficiency,
    Measurement,
    Operation,
    calibrate,
    device,
    operation_seconds,
    seconds_of,
)

H100 = device("h100")
WORK = st.floats(0, 1e18)
FRACTION = st.floats(0.01, 1)
EFFICIENCY = st.builds(Efficiency, FRACTION, FRACTION, st.floats(0, 1e-3))


@given(WORK, WORK, WORK, WORK, EFFICIENCY)
def test_more_work_takes_no_less_time(flops: float, size: float, more: float, farther: float, e: Efficiency) -> None:
    before = operation_seconds(Operation(flops, size, "bfloat16"), H100, e)
    assert operation_seconds(Operation(flops + more, size + farther, "bfloat16"), H100, e) >= before


@given(WORK, WORK, st.sampled_from(sorted(H100.flops_per_second)), EFFICIENCY)
def test_never_faster_than_the_peaks(flops: float, size: float, dtype: str, efficiency: Efficiency) -> None:
    seconds = operation_seconds(Operation(flops, size, dtype), H100, efficiency) * (1 + 1e-9)
    assert seconds >= flops / H100.peak(dtype)
    assert seconds >= size / H100.bytes_per_second
    assert seconds >= efficiency.launch_seconds


def test_by_hand() -> None:
    half = Efficiency(0.5, 0.25, 1e-6)
    assert operation_seconds(Operation(989.4e12, 0, "bfloat16", 3), H100, half) == pytest.approx(3 * (2 + 1e-6))
    assert operation_seconds(Operation(0, 3350e9), H100, half) == pytest.approx(4 + 1e-6)
    assert seconds_of([Operation(1, 3350e9), Operation(494.7e12, 1, "tf32")], H100, half) == pytest.approx(6 + 2e-6)
    v100 = device("v100")  # has no peak in bfloat16, and needs none where nothing is multiplied
    assert operation_seconds(Operation(0, 900e9, "bfloat16"), v100, Efficiency(1, 1, 0)) == pytest.approx(1)
    with pytest.raises(ArgumentError, match="no stated peak for products in bfloat16"):
        operation_seconds(Operation(1, 900e9, "bfloat16"), v100)


def _measured(truth: Efficiency) -> list[Measurement]:
    runs = [
        [Operation(1e12, 1e7, "bfloat16"), Operation(0, 1e8, count=5)],
        [Operation(1e9, 1e6, "bfloat16"), Operation(0, 1e4, count=40)],
        [Operation(0, 1e4, count=4)],
        [Operation(0, 1e9, count=3)],
        [Operation(5e13, 1e9, "bfloat16", 2), Operation(0, 3e9)],
    ]
    return [Measurement(run, seconds_of(run, H100, truth) + truth.run_seconds) for run in runs]


@pytest.mark.parametrize(
    "truth", [Efficiency(0.45, 0.6, 1e-5), Efficiency(0.9, 0.3, 1e-6), Efficiency(0.05, 0.9, 8e-5)]
)
def test_planted_constants_are_found(truth: Efficiency) -> None:
    found = calibrate(_measured(truth), H100)
    assert found.matmul_efficiency == pytest.approx(truth.matmul_efficiency, rel=0.01)
    assert found.bandwidth_efficiency == pytest.approx(truth.bandwidth_efficiency, rel=0.01)
    assert found.launch_seconds == pytest.approx(truth.launch_seconds, rel=0.02)
    assert found.run_seconds == pytest.approx(truth.run_seconds, rel=0.02, abs=2e-7)
    assert found.measurements == 5
    assert found.error < 0.005
    assert "fitted to 4 measurements (median error 0.0%)" in Efficiency(0.5, 0.5, 0, 4).text


def test_what_no_measurement_tells_stays_where_it_was() -> None:
    assert calibrate([], H100) == DEFAULT_EFFICIENCY
    products = [Measurement([Operation(flops, 1, "bfloat16")], flops / (0.35 * 989.4e12)) for flops in (1e15, 4e15)]
    found = calibrate(products, H100)
    assert found.matmul_efficiency == pytest.approx(0.35, rel=0.05)
    assert found.bandwidth_efficiency == pytest.approx(DEFAULT_EFFICIENCY.bandwidth_efficiency)
    assert found.launch_seconds == pytest.approx(DEFAULT_EFFICIENCY.launch_seconds, rel=1e-3)
    beyond = calibrate([Measurement([Operation(1e15, 1, "bfloat16")], 0.1)], H100)  # faster than the peak
    assert beyond.matmul_efficiency == 1
    assert beyond.error > 5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: Efficiency(0, 0.5, 0), "matmul_efficiency=0: expected a fraction"),
        (lambda: Efficiency(0.5, 1.5, 0), "bandwidth_efficiency=1.5: expected a fraction"),
        (lambda: Efficiency(0.5, 0.5, -1), "launch_seconds=-1: expected 0 or more"),
        (lambda: Measurement([], 1.0), "expected at least one operation"),
        (lambda: Measurement([Operation(1, 1)], 0.0), "seconds=0.0; expected a time above 0"),
    ],
)
def test_bad_values(wrong: object, words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        wrong()  # type: ignore[operator]
