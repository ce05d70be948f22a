"""Estimated profiles: times from operations, marked as such; their constants from what was measured."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from penstock import ArgumentError
from penstock.costs import OpCounts, Profile, UnitCost, estimate, fit_efficiency
from penstock.costs.hardware import DEFAULT_EFFICIENCY, DeviceSpec, Efficiency, Operation, device, seconds_of

H100 = device("h100")
MINE = DeviceSpec("mine", "mine", {"float32": 1e11}, 1e10, 1e10, type="cpu")

DONE = OpCounts(
    (Operation(1e12, 1e6), Operation(0, 3e8, count=2)),
    (Operation(1e12, 1e6, count=2), Operation(0, 6e8)),
    (Operation(1e12, 1e6),),
)
FEW = OpCounts((Operation(0, 1e9),), (Operation(0, 2e9), Operation(0, 64, count=10_000)), ())
COUNTED = Profile(
    (
        UnitCost("a", 0, 0, 0, activation_bytes=7, operations=FEW),
        UnitCost("b", 0, 0, 0, operations=DONE),
        UnitCost("c", 0, 0, 0, like="b"),
    ),
    "cpu",
    "float32",
    {"a.weight": (2, 3)},
    rows=4,
)


def test_times_are_those_of_the_operations() -> None:
    half = Efficiency(0.5, 0.5, 1e-5)
    found = estimate(COUNTED, H100, half)
    a, b, c = found.units
    assert b.forward_seconds == pytest.approx(seconds_of(DONE.forward, H100, half))
    assert b.input_gradient_seconds == pytest.approx(seconds_of(DONE.input_gradient, H100, half))
    assert b.seconds - b.forward_seconds == pytest.approx(seconds_of(DONE.backward, H100, half))
    assert (c.seconds, c.like) == (b.seconds, "b")
    assert (a.input_gradient_seconds, a.activation_bytes) == (0, 7)


def test_a_run_counts_once_for_a_forward_and_once_for_a_backward() -> None:
    slow = Efficiency(0.5, 0.5, 0.0, run_seconds=10.0)
    found, without = (estimate(COUNTED, H100, each).units for each in (slow, replace(slow, run_seconds=0.0)))
    assert [unit.seconds - bare.seconds for unit, bare in zip(found, without, strict=True)] == pytest.approx([20.0] * 3)
    views = replace(COUNTED, units=(UnitCost("a", 0, 0, 0, operations=OpCounts()),))
    assert estimate(views, H100, slow).units[0].seconds == 10.0


def test_it_says_what_it_is() -> None:
    found = Profile.from_dict(json.loads(json.dumps(estimate(COUNTED, H100).to_dict())))
    assert (found.source, found.device, found.runs) == ("estimate", "cuda", 0)
    assert found.device_name == "NVIDIA H100 SXM 80GB"
    assert found.notes[-1].startswith("not measured: an estimate from NVIDIA H100 SXM 80GB's specifications: 70% of")
    assert found.units[1].operations == DONE


def test_other_sizes_are_estimated_too() -> None:
    double = replace(COUNTED.units[0], operations=OpCounts(FEW.forward * 2, FEW.backward * 2))
    sizes = COUNTED.with_others([replace(COUNTED, units=(double, *COUNTED.units[1:]), rows=8)])
    small, large = estimate(sizes, H100).each_size
    assert (small.rows, large.rows) == (4, 8)
    assert large.units[0].seconds == pytest.approx(2 * small.units[0].seconds)


def test_constants_come_from_a_measured_profile() -> None:
    truth = Efficiency(0.3, 0.6, 2e-5)
    measured = replace(estimate(COUNTED, MINE, truth), source="measured")
    found = fit_efficiency([measured], MINE)
    assert found.matmul_efficiency == pytest.approx(0.3, rel=0.02)
    assert found.bandwidth_efficiency == pytest.approx(0.6, rel=0.02)
    assert found.launch_seconds == pytest.approx(2e-5, rel=0.05)
    assert found.measurements == 5  # F and B of each kind, and I of the one that has W too
    assert fit_efficiency([], MINE) == DEFAULT_EFFICIENCY


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"source": "estimate"}, "the profile of mine is an estimate itself; pass a measured one"),
        ({"device": "cuda"}, r"was measured on mine \(cuda\), not on mine \(cpu\)"),
        ({"units": (UnitCost("a", 1, 1, 1),)}, "unit 'a': the profile has its times but no operations"),
    ],
)
def test_what_cannot_calibrate_is_refused(change: dict[str, object], words: str) -> None:
    measured = replace(estimate(COUNTED, MINE), source="measured")
    with pytest.raises(ArgumentError, match=words):
        fit_efficiency([replace(measured, **change)], MINE)  # type: ignore[arg-type]
    other = replace(estimate(COUNTED, H100), source="measured", device_name="NVIDIA H200")
    with pytest.raises(ArgumentError, match=r"measured on NVIDIA H200 .*, not on NVIDIA H100 SXM 80GB"):
        fit_efficiency([other], H100)
    assert fit_efficiency([replace(other, device_name="NVIDIA H100 80GB HBM3")], H100).measurements == 5
