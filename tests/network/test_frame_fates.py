"""What is drawn for the frames of a link: netem's distributions, the shares asked for, one sequence a seed."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.network.frame_fates import CORRUPT, DUPLICATE, LOST, REORDER, Decisions, FrameFates, quantile
from penstock.network.link import DISTRIBUTIONS, Bursts, Impairment
from penstock.network.parse import parse_link

MANY = 200_000


def _impairment(text: str) -> Impairment:
    return parse_link(f"1gbit {text}").impairment


def _drawn(text: str, count: int = MANY, seed: int = 1, direction: int = 0) -> Decisions:
    return FrameFates(_impairment(text), seed, direction).next(count)


TEXTS = [
    "delay 5ms 1ms 30% distribution pareto loss 1% 20% duplicate 2% corrupt 3% 10% reorder 25% 50% gap 4",
    "delay 5ms 9ms distribution normal loss gemodel 1% 10% 70% 0.1% reorder 1%",
    "loss 50%",
]


@pytest.mark.parametrize("text", TEXTS)
@given(sizes=st.lists(st.integers(0, 70), max_size=8), seed=st.integers(-(2**40), 2**40))
def test_how_many_are_drawn_at_once_does_not_matter(text: str, sizes: list[int], seed: int) -> None:
    draws = FrameFates(_impairment(text), seed, 3)
    parts = [draws.next(size) for size in [*sizes, 5]]
    whole = FrameFates(_impairment(text), seed, 3).next(sum(sizes) + 5)
    for name in ("fate", "delay_ns", "bit"):
        assert np.array_equal(np.concatenate([getattr(part, name) for part in parts]), getattr(whole, name))


def test_another_seed_or_direction_is_another_sequence() -> None:
    first = _drawn("delay 5ms 1ms loss 10%", 500)
    for other in (_drawn("delay 5ms 1ms loss 10%", 500, seed=2), _drawn("delay 5ms 1ms loss 10%", 500, direction=1)):
        assert not np.array_equal(first.fate, other.fate)
        assert not np.array_equal(first.delay_ns, other.delay_ns)


def test_what_is_added_to_a_link_does_not_change_the_rest() -> None:
    before, after = _drawn("delay 5ms 1ms loss 10%", 5000), _drawn("delay 5ms 1ms loss 10% duplicate 5%", 5000)
    assert np.array_equal(before.delay_ns, after.delay_ns)
    assert np.array_equal(before.fate & LOST, after.fate & LOST)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_the_jitter_has_its_distribution(distribution: str) -> None:
    found = _drawn(f"delay 50ms 2ms distribution {distribution}").delay_ns / 1e6
    shares = np.array([0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999])
    expected = 50 + 2 * quantile(distribution, shares)
    spread = 4 * np.sqrt(shares * (1 - shares) / MANY)
    low = 50 + 2 * quantile(distribution, np.maximum(shares - spread, 0)) - 1e-3
    high = 50 + 2 * quantile(distribution, np.minimum(shares + spread, 1)) + 1e-3
    measured = np.quantile(found, shares)
    assert ((low <= measured) & (measured <= high)).all(), (expected, measured)
    assert found.max() <= 50 + 2 * (1 if distribution == "uniform" else 4)


@pytest.mark.parametrize("distribution", ["normal", "pareto", "paretonormal"])
def test_the_distributions_are_those_of_tc(distribution: str) -> None:
    folders = ("lib/tc", "lib64/tc", "lib/*-linux-gnu/tc")
    tables = [table for folder in folders for table in Path("/usr").glob(f"{folder}/{distribution}.dist")]
    if not tables:
        pytest.skip("tc's tables are not installed")
    lines = [line for line in tables[0].read_text().splitlines() if not line.startswith("#")]
    table = np.array([int(value) for line in lines for value in line.split()]) / 8192
    ours = quantile(distribution, np.arange(len(table)) / len(table))
    assert np.abs(table - ours)[20:-20].max() < 0.02


def _share(fate: np.ndarray, bit: int) -> float:
    return float((fate & bit > 0).mean())


@pytest.mark.parametrize("correlation", ["", " 25%", " 90%"])
@pytest.mark.parametrize(
    ("word", "bit"), [("loss", LOST), ("duplicate", DUPLICATE), ("corrupt", CORRUPT), ("reorder", REORDER)]
)
def test_shares_are_kept_with_and_without_correlation(word: str, bit: int, correlation: str) -> None:
    found = _drawn(f"delay 1ms {word} 4%{correlation}").fate
    assert set(np.unique(found)) == {0, bit}
    # Runs of the same luck make fewer independent ones of the draws: one in ten at 90%.
    assert _share(found, bit) == pytest.approx(0.04, abs=5 * np.sqrt(0.04 * 0.96 / MANY * 19))


def test_bursts_are_those_of_the_model() -> None:
    link = parse_link("1gbit loss gemodel 1% 10% 70% 0.5%")
    lost = _drawn("loss gemodel 1% 10% 70% 0.5%").fate & LOST > 0
    assert link.impairment.loss == Bursts(0.01, 0.1, 0.7, 0.005)
    assert lost.mean() == pytest.approx((0.01 * 0.7 + 0.1 * 0.005) / 0.11, abs=0.006)
    again = lost[1:][lost[:-1]].mean()
    assert again == pytest.approx(0.9 * 0.7, abs=0.05)  # it stays bad in 9 of 10, and then 7 of 10 are lost


def test_a_gap_lies_between_frames_that_jump() -> None:
    places = np.flatnonzero(_drawn("delay 1ms reorder 100% gap 5").fate & REORDER)
    assert set(np.diff(places)) == {5}
    places = np.flatnonzero(_drawn("delay 1ms reorder 30% gap 5").fate & REORDER)
    assert np.diff(places).min() == 5
    assert np.diff(places).mean() == pytest.approx(4 + 1 / 0.3, rel=0.05)
