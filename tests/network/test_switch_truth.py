"""The emulated network matches its settings, as measured from host to host by means that are not the switch's.

Bounds are those of the promise (5% or 0.2 ms, 3% of a rate, a 99.9% interval of a share), and what a crowded machine
adds. A machine may also stand still for a while, and then nothing is on time: of three measurements one must hold, as a
wrong switch is wrong in all. benchmarks/switch/truth.py has the figures of an idle machine.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import TypeVar

import numpy as np
import pytest
import wire
from wire import Arrival, Flow

from penstock.network.frame_fates import CORRUPT, DUPLICATE, LOST, REORDER, Decisions, FrameFates
from penstock.network.link import DISTRIBUTIONS
from penstock.network.machines import Machines
from penstock.network.namespaces import why_not
from penstock.network.parse import parse_link
from penstock.network.shapers import why_no_switch
from penstock.network.topology import Topology

_MISSING = why_not() or why_no_switch()
pytestmark = [pytest.mark.alone, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]

T = TypeVar("T")
SEED = 7
LATE_SECONDS, CROWDED_SECONDS = 0.25e-3, 0.5e-3
"""How late the quickest frame may be, 5% of its 5 ms, and what a crowded machine adds for half of them: who receives a
frame has to wait for a core."""
SIGMAS = 3.29
"""Of a normal distribution's 99.9% interval."""


def _network(hosts: int, text: str, own: dict[int, str] | None = None) -> Machines:
    links = {host: parse_link(one) for host, one in (own or {}).items()}
    return Machines(hosts, Topology(parse_link(text), links, SEED), shaper="switch")


def _holds_once(measure: Callable[[int], T], check: Callable[[T], None]) -> None:
    """Measures up to three times, until it is as it should be."""
    for number in range(3):
        found = measure(number)
        try:
            check(found)
            return
        except AssertionError:
            if number == 2:
                raise


# One network with a link of its own for most hosts, on which all is measured at once.

SHARES = {
    "loss": ("delay 40ms loss 10%", LOST),
    "duplicate": ("delay 40ms duplicate 10%", DUPLICATE),
    "corrupt": ("delay 40ms corrupt 10%", CORRUPT),
    "reorder": ("delay 40ms reorder 10%", REORDER),
}
SINK = len(DISTRIBUTIONS) + len(SHARES)
OWN = {
    **{host: f"100mbit delay 5ms jitter 1ms distribution {name}" for host, name in enumerate(DISTRIBUTIONS)},
    **{len(DISTRIBUTIONS) + place: f"100mbit {text}" for place, (text, _) in enumerate(SHARES.values())},
}
FRAMES, APART = 400, 0.0085
"""Further apart than the jitter reaches, or frames would wait for those in front."""
SHARED_FRAMES, SHARED_APART = 1700, 0.002


@cache
def _measured(number: int) -> list[list[Arrival]]:
    """What arrives of each flow, in the measurement of this number."""
    flows = [Flow(host, SINK, FRAMES, APART) for host in range(len(DISTRIBUTIONS))]
    flows += [Flow(len(DISTRIBUTIONS) + place, SINK, SHARED_FRAMES, SHARED_APART) for place in range(len(SHARES))]
    with _network(SINK + 1, "100mbit", OWN) as machines:
        return wire.sent(machines, flows, last=0.1)


def _drawn(host: int, count: int) -> Decisions:
    return FrameFates(parse_link(OWN[host]).impairment, SEED, host).next(count)


@pytest.mark.parametrize("host", range(len(DISTRIBUTIONS)), ids=DISTRIBUTIONS)
def test_each_frame_takes_the_time_that_was_drawn_for_it(host: int) -> None:
    """test_frame_fates.py has the distributions from which it is drawn."""
    drawn = _drawn(host, FRAMES).delay_ns / 1e9

    def check(flows: list[list[Arrival]]) -> None:
        late = np.array([one.took - drawn[one.number] for one in flows[host]])
        assert len(late) == FRAMES
        assert 0 < late.min() < LATE_SECONDS, "no frame comes before its time, and the quickest at it"
        assert np.median(late) < LATE_SECONDS + CROWDED_SECONDS

    _holds_once(_measured, check)


def _overtaking(arrivals: Sequence[Arrival]) -> list[int]:
    """The frames that came before one that was sent earlier."""
    found, least = [], math.inf
    for one in sorted(arrivals, key=lambda one: one.came, reverse=True):
        if one.number > least:
            found.append(one.number)
        least = min(least, one.number)
    return sorted(found)


@pytest.mark.parametrize("place", range(len(SHARES)), ids=SHARES)
def test_shares_are_those_that_were_asked_for(place: int) -> None:
    host = len(DISTRIBUTIONS) + place
    name, (_, bit) = [*SHARES.items()][place]
    decided = np.flatnonzero(_drawn(host, SHARED_FRAMES).fate & bit).tolist()
    assert abs(len(decided) / SHARED_FRAMES - 0.1) < SIGMAS * math.sqrt(0.1 * 0.9 / SHARED_FRAMES)

    def check(flows: list[list[Arrival]]) -> None:
        came = wire.counts(flows[host])
        happened = {
            "loss": [number for number in range(SHARED_FRAMES) if came[number] == 0],
            "duplicate": [number for number, times in sorted(came.items()) if times == 2],
            "corrupt": [one.number for one in flows[host] if one.broken],
            "reorder": _overtaking(flows[host]),
        }
        assert happened == {other: decided if other == name else [] for other in SHARES}

    _holds_once(_measured, check)


# Rates.

RATE_LINKS = {1: "up 100mbit down 50mbit", 2: "up 100mbit down 10mbit"}


def _bytes_per_second(arrivals: Sequence[Arrival], size: int) -> float:
    times = [one.came for one in arrivals]
    return size * (len(times) - 1) / (max(times) - min(times))


def test_what_arrives_of_twice_the_rate_is_the_rate() -> None:
    """Of many frames that come to a link, from one host at twice its rate and from two at more than that."""

    def measure(number: int) -> list[float]:
        with _network(4, "100mbit", RATE_LINKS) as machines:
            one = wire.sent(machines, [Flow(0, 1, 6000, 0, 1514)], last=0.5)[0]
            two = wire.sent(machines, [Flow(0, 2, 1500, 0, 700), Flow(3, 2, 1500, 0, 700)], last=1)
        both = two[0] + two[1]
        assert len(both) < 3000
        return [_bytes_per_second(one, 1514), _bytes_per_second(both, 700)]

    def check(rates: list[float]) -> None:
        for found, asked in zip(rates, (50e6 / 8, 10e6 / 8), strict=True):
            assert 0.85 * asked < found < 1.03 * asked  # a crowded machine may lose time, but never makes any

    _holds_once(measure, check)


def test_frames_that_are_not_read_in_time_are_told() -> None:
    with _network(2, "400mbit") as machines:
        assert machines._switch is not None
        switch = machines._switch._process.pid
        os.kill(switch, signal.SIGSTOP)
        try:
            wire.send(machines, [Flow(0, 1, 40_000, 0, 200)])  # in 160 ms at this rate; a device keeps 10,000
            time.sleep(0.3)
        finally:
            os.kill(switch, signal.SIGCONT)
        told = machines.counters()
    assert told["unread"][0] > 10_000
    assert told["unread"][1] == 0
    assert told["links"][0]["up"]["frames"] + told["unread"][0] <= 40_000
