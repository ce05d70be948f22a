"""What a link is measured at: by a stream once it is steady, and never faster than what shapes it."""

from __future__ import annotations

import time
from dataclasses import replace

import fabric_jobs as jobs
import numpy as np
import pytest

from penstock.network.fabric.emulation import probe
from penstock.network.fabric.emulation.probe import (
    LinkMeasurement,
    split_round_trip,
)
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.workload import Workload
from penstock.network.parse import parse_link
from penstock.network.topology import Topology
from scaffolding.ranks import Ranks

SPEC = Spec(Workload.from_sizes([4]), 2)


@pytest.mark.parametrize("mbit", [10, 1000])
def test_a_stream_is_measured_in_its_steady_half(mbit: float) -> None:
    """Within the 5 % that is promised, although it starts slowly, and its receiver wakes late now and then."""
    chunk = 10**6
    apart = np.full(probe.CHUNKS, chunk / (mbit * 125e3))
    apart[:8] *= 9  # TCP's slow start
    late = np.where(np.arange(probe.CHUNKS) % 7 == 5, 0.7 * apart[-1], 0.0)
    found = probe.compute_pace(np.cumsum(apart) + late, chunk)
    assert found.bytes_per_second == pytest.approx(mbit * 125e3, rel=0.05)
    assert found.steady
    assert not probe.compute_pace(np.cumsum(apart / np.linspace(1, 2, probe.CHUNKS)), chunk).steady, "it still grows"


@pytest.mark.distributed
def test_a_paced_link_is_measured_at_its_pace(ranks2: Ranks) -> None:
    rate = 4e6
    began = time.monotonic()
    for found in ranks2.run(jobs.probed, SPEC, jobs.Slow(rate)):
        assert [(one["from"], one["to"]) for one in found] == [(0, 1), (1, 0)]
        for one in found:
            # What is paced cannot be faster. How much slower it is depends on what else the machine does.
            assert 0 < one["bytes_per_second"] <= rate * (1 + probe.TOLERANCE)
            assert 0 <= one["latency_seconds"] < time.monotonic() - began


@pytest.mark.distributed
def test_a_rate_above_the_shapers_is_an_error(ranks2: Ranks) -> None:
    said = ranks2.run(jobs.probed, _spec("16kbit"))  # over loopback, which is faster
    assert said[0] == said[1]
    assert "Penstock measured the link from host 0 to host 1" in said[0]
    assert "although its shaper passes only 0.0 Mbit/s. A receiver that wakes late reads at once" in said[0]


def test_which_rate_is_the_shapers() -> None:
    ends = probe.shaped_ends(_topology("up 100mbit down 20mbit", {"1": "up 50mbit down 40mbit"}), (0, 1))
    assert ends is not None
    for way, rate in (((0, 1), 40 * 125e3), ((1, 0), 20 * 125e3)):
        assert probe.above_shaper(way, LinkMeasurement(0.0, 1.005 * rate), ends[way]) is None
        assert probe.above_shaper(way, LinkMeasurement(0.0, 1.02 * rate), ends[way]) is not None
        assert probe.above_shaper(way, LinkMeasurement(0.0, None), ends[way]) is not None
    assert probe.shaped_ends(None, (0, 1)) is None


def _spec(link: str) -> Spec:
    return replace(SPEC, network={"link": link, "own": {}, "rates": _topology(link, {}).rates(2), "mtu": 1500})


def _topology(link: str, own: dict[str, str]) -> Topology:
    return Topology(parse_link(link)).with_links({int(host): parse_link(text) for host, text in own.items()})


@pytest.mark.parametrize(
    ("link", "own", "trip_ms", "latencies_ms"),
    [
        # Of 1 Mbit/s, 8 us a byte: the packets of 118 and 84 bytes pass the slow end one after the other.
        ("1mbit delay 2ms", {}, 2 * (2 + 320 * 8e-3), (2, 2)),
        ("up 1mbit delay 2ms down 100mbit", {}, 2 * (2 + 202 * 8e-3 + 84 * 8e-5), (2, 2)),
        ("up 100mbit delay 2ms down 1mbit", {}, 2 * (2 + 118 * 8e-5 + 202 * 8e-3), (2, 2)),
        ("up 10mbit down 100mbit", {}, 2 * (0.05 + 202 * 8e-4 + 84 * 8e-5), (0.05, 0.05)),
        # Only host 1 is slow: what it sends takes its time on the way up, and what it gets on the way down.
        ("1gbit", {"1": "1mbit"}, 0.2 + 404 * 8e-3 + (118 + 84) * 8e-6, (0.1, 0.1)),
        # There 30 ms, back 10.
        ("1gbit", {"0": "up 1gbit delay 30ms down 1gbit delay 10ms"}, 40 + 2 * 320 * 8e-6, (30, 10)),
    ],
)  # fmt: skip
def test_latency_is_what_is_left_of_a_trip_through_ends_of_their_own(
    link: str, own: dict[str, str], trip_ms: float, latencies_ms: tuple[float, float]
) -> None:
    ends = probe.shaped_ends(_topology(link, own), (0, 1))
    assert ends is not None
    found = split_round_trip(trip_ms * 1e-3, {(0, 1): 1e5, (1, 0): 1e5}, ends)
    for way, latency in zip(((0, 1), (1, 0)), latencies_ms, strict=True):
        assert found[way].latency_seconds == pytest.approx(latency * 1e-3, abs=2e-6)
