"""Neighbors' traffic: what a text means, and how much of it comes when."""

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from penstock._base.errors import ArgumentError
from penstock.network.background import AHEAD_NS, Neighbor, Stream, arrivals, parse_background
from penstock.network.parse import parse_link
from penstock.network.switch import columns
from penstock.network.switch.filling import create_tables
from penstock.network.switch.serve import Background
from penstock.network.topology import Topology


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("50mbit", Neighbor(None, bytes_per_second=6.25e6)),
        ("50mbit to 1", Neighbor(1, bytes_per_second=6.25e6)),
        ("50mbit size 500 to 1", Neighbor(1, 500, bytes_per_second=6.25e6)),
        ("10gbit size 100", Neighbor(None, 12500, bytes_per_second=1.25e9)),  # no more than 100,000 frames a second
        ("incast 1mb every 100ms to 2", Neighbor(2, burst_bytes=1024**2, period_seconds=0.1)),
        ("incast 1mb every 10ms size 64", Neighbor(None, 1049, burst_bytes=1024**2, period_seconds=0.01)),
    ],
)
def test_texts(text: str, expected: Neighbor) -> None:
    found = parse_background(text, 4)
    for name in ("target", "frame_bytes", "burst_bytes"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.bytes_per_second == pytest.approx(expected.bytes_per_second)
    assert found.period_seconds == pytest.approx(expected.period_seconds)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("lots", "not a rate"),
        ("0mbit", "rate is 0"),
        ("50 to 1", "did you mean 50mbit"),
        ("50mbit to 4", "host 4 does not exist: the hosts are 0 to 3"),
        ("50mbit to", "needs a value"),
        ("50mbit to 1 to 2", "given twice"),
        ("50mbit rate 5", "'rate' is unknown here: pass to, size"),
        ("50mbit size 10", "a frame cannot have 10 bytes: pass 64 to 65535"),
        ("incast", "needs a value"),
        ("incast 1mb", "needs its period"),
        ("trace /none/there.csv", "No such file"),
    ],
)
def test_what_is_no_traffic_is_refused(text: str, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        parse_background(text, 4)


def _until(text: str, seconds: float, seed: int = 1, host: int = 0) -> list[tuple[int, int]]:
    parts = arrivals(parse_background(text, 4), seed, host)
    frames = ((at, size) for times, sizes in parts for at, size in zip(times.tolist(), sizes.tolist(), strict=True))
    return list(itertools.takewhile(lambda frame: frame[0] < seconds * 1e9, frames))


def test_a_rate_comes_at_random_and_in_full() -> None:
    frames = _until("80mbit size 1000", 2.0)
    assert sum(size for _, size in frames) * 8 / 2.0 == pytest.approx(80e6, rel=0.03)
    gaps = [after - before for (before, _), (after, _) in itertools.pairwise(frames)]
    mean = sum(gaps) / len(gaps)
    assert sum(gap < mean for gap in gaps) / len(gaps) == pytest.approx(1 - 2.71828**-1, abs=0.02)
    assert frames == _until("80mbit size 1000", 2.0)
    assert frames != _until("80mbit size 1000", 2.0, seed=2)
    assert frames != _until("80mbit size 1000", 2.0, host=1)


def test_a_trace_is_played_again_and_again(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,bytes\n0,100\n0.5,200\n1,300\n")
    assert _until(f"trace {path}", 2.2) == [
        (0, 100), (500_000_000, 200), (1_000_000_000, 300),
        (1_000_000_000, 100), (1_500_000_000, 200), (2_000_000_000, 300), (2_000_000_000, 100),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("", "no traffic"),
        ("0,100\n", "no traffic"),
        ("0,100\n1\n", "row 2: '1' is no"),
        ("1,100\n0.5,100\n", "row 2: times"),
        ("1,0\n", "row 1: times"),
        ("0,9\n0,9\n0,9\n0.00001,9\n", "has 4 frames: pass at most 1 in that time"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, rows: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(rows)
    with pytest.raises(ArgumentError, match=said):
        parse_background(f"trace {path}", 4)


def test_frames_that_find_no_room_come_with_the_next() -> None:
    neighbors = [parse_background(text, 2) for text in ("80mbit size 1000", "incast 100kb every 5ms", "9mbit to 1")]
    once, often = (Stream(neighbors, 1, 0) for _ in range(2))
    whole = once.until(20_000_000, 10_000)
    parts = [often.until(20_000_000, 50) for _ in range(20)]
    for found, pieces in zip(whole, zip(*parts, strict=True), strict=True):
        assert np.array_equal(found, np.concatenate(pieces))


def test_neighbors_that_are_alike_come_at_moments_of_their_own() -> None:
    at_ns, _ = Stream([parse_background("80mbit size 1000", 2)] * 2, 1, 0).until(20_000_000, 10_000)
    assert len({*at_ns.tolist()}) > 0.9 * len(at_ns) > 100


@pytest.mark.alone
def test_neighbors_come_from_the_moment_on_that_they_were_ordered() -> None:
    t = create_tables(Topology(parse_link("1gbit")), [-1, -1], 0)
    began = time.monotonic_ns()
    background = Background(t, (parse_background("80mbit size 1000 to 1", 2),), 1)
    made = time.monotonic_ns()
    background.fill()
    until = time.monotonic_ns() + AHEAD_NS
    nobody, shared = (int(t.lines[2 + host, columns.NEAR_MADE]) for host in range(2))
    assert nobody == 0
    frames = t.near[1, :shared]
    at_ns = frames[:, columns.AT_NS]
    assert set(frames[:, columns.SIZE]) == {1000}
    assert (at_ns >= began).all()
    assert (at_ns < until).all()
    assert at_ns[0] < made + 5_000_000, "one comes each 0.1 ms"
    assert at_ns[-1] > began + AHEAD_NS - 5_000_000
