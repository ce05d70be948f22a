"""Compares what was asked of a network with what is measured on it.

    sudo python benchmarks/switch/truth.py            # five minutes; wants an idle machine
    sudo python benchmarks/switch/truth.py --short    # one minute, to see that it runs

Frames carry the time at which they were sent, and the kernel timestamps their arrival (tests/network/wire.py). The
bounds: a quantile within 5% or 0.2 ms one way, a share within its 99.9% interval, a rate within 3%.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "network"))

import numpy as np
import tcp_and_ping
import wire
from wire import Arrival, Flow

from penstock.network.frame_fates import FrameFates, quantile
from penstock.network.link import DISTRIBUTIONS
from penstock.network.machines import Machines
from penstock.network.parse import parse_link
from penstock.network.topology import Topology

SEED = 11
LATE, RELATIVE, RATE_RELATIVE, SIGMAS = 0.2e-3, 0.05, 0.03, 3.29
SHARES = (0.1, 0.5, 0.9, 0.99)
HEADLINE = "1gbit delay 5ms jitter 1ms distribution pareto loss 0.1% reorder 0.01% stall 2s every 60s"


@dataclass(frozen=True)
class Row:
    """One figure: in milliseconds, percent or Mbit/s, with the bound on the difference."""

    link: str
    what: str
    asked: float
    found: float
    bound: float
    unit: str

    @property
    def holds(self) -> bool:
        return bool(abs(self.found - self.asked) <= self.bound)


def network(hosts: int, text: str, own: dict[int, str] | None = None, **more: Any) -> Machines:
    links = {host: parse_link(one) for host, one in (own or {}).items()}
    return Machines(hosts, Topology(parse_link(text), links, SEED), shaper="switch", **more)


def took(arrivals: Sequence[Arrival]) -> np.ndarray:
    return np.array([one.took for one in arrivals])


def time_row(link: str, what: str, asked: float, found: float) -> Row:
    return Row(link, what, float(asked) * 1e3, float(found) * 1e3, float(max(RELATIVE * asked, LATE)) * 1e3, "ms")


def share_row(link: str, what: str, asked: float, found: int, of: int, runs: float = 1.0) -> Row:
    """The row for a share of frames. `runs`: the factor by which correlation increases the variance."""
    spread = SIGMAS * math.sqrt(asked * (1 - asked) / of * runs)
    return Row(link, f"{what}, {of:,} frames", asked * 100, found / of * 100, spread * 100, "%")


def rate_row(link: str, what: str, asked: float, found: float) -> Row:
    return Row(link, what, asked * 8 / 1e6, found * 8 / 1e6, RATE_RELATIVE * asked * 8 / 1e6, "mbit")


def distributions(scale: float) -> Iterator[Row]:
    """One-way quantiles against the model's own, with frames further apart than the jitter."""
    for delay, jitter, every in ((5, 1, 0.0085), (20, 5, 0.0405)):
        own = {
            host: f"100mbit delay {delay}ms jitter {jitter}ms distribution {name}"
            for host, name in enumerate(DISTRIBUTIONS)
        }
        count = round(6000 * scale * 0.0085 / every)
        sink = len(own)
        with network(sink + 1, "100mbit", own) as machines:
            found = wire.sent(machines, [Flow(host, sink, count, every) for host in own], last=0.1)
        for host, name in enumerate(DISTRIBUTIONS):
            # Compare with the draws themselves, which the seed determines, so that sampling noise is no error.
            drawn = FrameFates(parse_link(own[host]).impairment, SEED, host).next(count).delay_ns / 1e9
            for share in SHARES:
                yield time_row(
                    own[host], f"p{share * 100:.0f} of these draws", np.quantile(drawn, share),
                    np.quantile(took(found[host]), share),
                )  # fmt: skip
            yield time_row(
                own[host], "p50 of the law", (delay + jitter * float(quantile(name, np.array([0.5]))[0])) / 1e3,
                np.quantile(took(found[host]), 0.5),
            )  # fmt: skip


def delays(scale: float) -> Iterator[Row]:
    """Links with nothing but a delay, and round trips by ping."""
    own = {host: f"100mbit delay {delay}ms" for host, delay in enumerate((0, 1, 5, 20, 100))}
    own[5], own[6] = "up 100mbit delay 2ms down 100mbit delay 30ms", "100mbit delay 10ms"
    pairs = {(0, 7): 0, (1, 7): 1, (2, 7): 5, (3, 7): 20, (4, 7): 100, (5, 7): 2, (7, 5): 30, (5, 6): 12, (6, 5): 40}
    with network(8, "100mbit delay 3ms", own) as machines:
        flows = [Flow(source, target, round(2000 * scale), 0.005) for source, target in pairs]
        found = wire.sent(machines, flows, last=0.2)
        trips = {host: tcp_and_ping.ping(machines, host, 7, round(200 * scale), 0.02) for host in (1, 3)}
    for (source, target), delay, arrivals in zip(pairs, pairs.values(), found, strict=True):
        text = f"{own.get(source, 'common')} -> {own.get(target, 'common')}"
        for share in (0.1, 0.5, 0.99):
            yield time_row(text, f"p{share * 100:.0f}", delay / 1e3, np.quantile(took(arrivals), share))
    for host, times in trips.items():
        there = time_row(own[host], "round trip of a ping, p50", 2 * pairs[host, 7] / 1e3, float(np.median(times)))
        yield replace(there, bound=max(there.bound, 2 * LATE * 1e3))  # two ways


def shares(scale: float) -> Iterator[Row]:
    """The shares of frames that were lost, duplicated, corrupted or reordered."""
    texts = [
        "loss 0.1%", "loss 1%", "loss 10%", "loss 5% 50%", "loss gemodel 1% 10%", "duplicate 1%", "corrupt 1%",
        "reorder 1%",
    ]  # fmt: skip
    own = {host: f"100mbit delay 20ms {text}" for host, text in enumerate(texts)}
    count, sink = round(20_000 * scale), len(texts)
    with network(sink + 1, "100mbit", own) as machines:
        flows = [Flow(host, sink, count, 0.001) for host in own]
        found = wire.sent(machines, flows, last=0.2)
    for host, arrivals in enumerate(found):
        text, impairment = own[host], parse_link(own[host]).impairment
        came = wire.counts(arrivals)
        if "loss" in text:
            runs = {"loss 5% 50%": 3.0, "loss gemodel 1% 10%": 19.0}.get(texts[host], 1.0)
            yield share_row(text, "lost", impairment.loss.share, count - len(came), count, runs)
        elif "duplicate" in text:
            yield share_row(text, "twice", 0.01, sum(times == 2 for times in came.values()), count)
        elif "corrupt" in text:
            yield share_row(text, "damaged", 0.01, sum(one.broken for one in arrivals), count)
        else:
            yield share_row(text, "past others", 0.01, int((took(arrivals) < 10e-3).sum()), count)


def rates(scale: float) -> Iterator[Row]:
    """What arrives if more than the rate is sent, on a host's own link and on a receiver's link of half the rate."""
    for text, wider, size, count in (
        ("10mbit", "20mbit", 1514, 3000),
        ("100mbit", "200mbit", 1514, 20_000),
        ("1gbit", "2gbit", 1514, 100_000),
        ("1gbit mtu 9000", "2gbit mtu 9000", 9014, 20_000),
    ):
        rate = parse_link(text).bytes_per_second
        own = {1: f"up {wider} down {text}", 2: text}
        with unrefused(network(4, wider, own)) as machines:
            for what, source, target in (("down, sent at twice the rate", 0, 1), ("up", 2, 3)):
                came = [one.came for one in wire.sent(machines, [Flow(source, target, round(count * scale), 0, size)],
                                                      last=1)[0]]  # fmt: skip
                yield rate_row(
                    text, f"{what}, {len(came):,} frames", rate, size * (len(came) - 1) / (came[-1] - came[0])
                )


def streams(scale: float) -> Iterator[Row]:
    """TCP's goodput. It depends on TCP and this machine as much as on the network, so it has no bound."""
    for hosts, text in ((2, "100mbit delay 1ms"), (4, "100mbit delay 1ms"), (2, "1gbit delay 1ms"), (4, HEADLINE)):
        with network(hosts, text) as machines:
            ring = [(host, (host + 1) % hosts) for host in range(hosts)]
            found = tcp_and_ping.stream(machines, ring, 5 * scale)
            link = machines.topology.link
        rate = link.bytes_per_second * link.goodput_ratio
        what = f"TCP in a ring of {hosts}, mtu {link.mtu}, the mean"
        yield Row(text, what, rate * 8 / 1e6, sum(found) / hosts * 8 / 1e6, math.inf, "mbit")


def stalls(scale: float) -> Iterator[Row]:
    """How long stalls last, and how far apart they are."""
    text, count = "100mbit stall 200ms every 1s", round(3000 + 10_000 * scale)
    with network(2, text) as machines:
        came = np.array([one.came for one in wire.sent(machines, [Flow(0, 1, count, 0.001)], last=1)[0]])
    waits = np.diff(came)
    ends = np.flatnonzero(waits > 0.1)
    yield time_row(text, f"a stall, the median of {len(ends)}", 0.2, float(np.median(waits[ends])))
    yield time_row(text, "from one to the next", 1.0, float(np.median(np.diff(came[ends + 1]))))
    yield Row(text, "lost", 0.0, (1 - len(came) / count) * 100, 0.0, "%")


def headline(scale: float) -> Iterator[Row]:
    """The issue's example with four hosts; one pair is measured."""
    count = round(3000 * scale)
    with network(4, HEADLINE) as machines:
        found = wire.sent(machines, [Flow(0, 1, count, 0.006)], last=2.5)[0]
        drawn = FrameFates(machines.topology.link.impairment, SEED, 0).next(count)
        text = f"{HEADLINE} (mtu {machines.topology.mtu})"
    delay = {one.number: one.took for one in found}
    kept = [number for number in delay if delay[number] < 0.015]  # not those that a stall held back
    for share in SHARES:
        asked = np.quantile(drawn.delay_ns[kept] / 1e9, share)
        yield time_row(text, f"p{share * 100:.0f}", asked, np.quantile([delay[number] for number in kept], share))
    yield share_row(text, "lost", 0.001, count - len(delay), count)


def unrefused(machines: Machines) -> Machines:
    """Allows rates that all hosts together could not reach: here only one sends at a time."""
    from penstock.network import machines as making
    from penstock.network.shapers import Shaper

    making.choose = lambda topology, *_: Shaper("switch", topology)
    return machines


PARTS: dict[str, Callable[[float], Iterator[Row]]] = {
    part.__name__: part for part in (delays, distributions, shares, stalls, headline, streams, rates)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    print(f"load {os.getloadavg()[0]:.2f}")
    for name in given.parts:
        for row in PARTS[name](0.15 if given.short else 1.0):
            rows.append({**asdict(row), "holds": row.holds, "part": name})
            bound = "" if math.isinf(row.bound) else f"within {row.bound:.3g}"
            print(
                f"{'ok ' if row.holds else 'OFF'} {row.link:75.75} {row.what:45} asked {row.asked:9.3f} found "
                f"{row.found:9.3f} {row.unit:4} {bound}",
                flush=True,
            )
    print(f"{sum(row['holds'] for row in rows)} of {len(rows)} hold; load {os.getloadavg()[0]:.2f}")
    if given.json is not None:
        about = {"kernel": platform.release(), "cores": os.cpu_count(), "load": os.getloadavg()[0]}
        for row in rows:
            row["bound"] = None if math.isinf(row["bound"]) else row["bound"]
        given.json.write_text(json.dumps({"machine": about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
