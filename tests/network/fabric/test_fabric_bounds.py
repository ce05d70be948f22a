"""A lower bound is one: no algorithm is faster, in however many pieces; and it is not below what has to be sent."""

from __future__ import annotations

from typing import Any, get_args

import numpy as np
import pytest
from drawn_runs import record_of, run_of

from penstock.network.fabric.algorithms import algorithms, busbw_factor
from penstock.network.fabric.alpha_beta import LinkFit, predict
from penstock.network.fabric.ports import Port, Ports, lower_bound_seconds, shaped_ports
from penstock.network.fabric.results import results
from penstock.network.fabric.samples import RunRecord
from penstock.network.fabric.steps import Collective, Terms
from penstock.network.fabric.workload import Transfer
from penstock.network.parse import parse_link
from penstock.network.topology import Topology

LINK = LinkFit(1e-4, 8e-8)
"""100 Mbit/s."""
SLOW = LinkFit(5e-4, 8e-7)
KINDS = get_args(Collective)
GOOD = 1448 / 1514
"""The share of a rate that is left for messages."""


def _ring(hosts: int, link: LinkFit = LINK) -> list[tuple[tuple[int, int], LinkFit]]:
    return [((host, (host + 1) % hosts), link) for host in range(hosts)]


def _ports(hosts: int, link: LinkFit = LINK, **own: LinkFit) -> Ports:
    """Ports as good as the link, and `h2=SLOW`: host 2's own."""
    links = [own.get(f"h{host}", link) for host in range(hosts)]
    each = tuple(Port(one.bytes_per_second) for one in links)
    far = {(a, b): max(links[a].alpha_seconds, links[b].alpha_seconds) for a in range(hosts) for b in range(hosts)}
    return Ports(each, each, far)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4, 64 * 1024, 8 * 1024**2])
def test_no_algorithm_is_faster_in_however_many_pieces(kind: str, size: int) -> None:
    for ranks in (2,) if kind == "send" else (2, 3, 4, 7, 16):
        bound = lower_bound_seconds(_ring(ranks), kind, range(ranks), size, ports=_ports(ranks))
        assert bound is not None
        took = [predict(LINK, kind, name, ranks, size) for name in algorithms(kind)]
        if "chain" in algorithms(kind):
            took += [LINK.seconds(Terms(ranks - 2 + k, (ranks - 2 + k) / k), size) for k in (1, 2, 64, 999)]
        assert bound <= min(took) * (1 + 1e-9)
        assert bound > LINK.alpha_seconds


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"send"}))
def test_what_has_to_pass_a_port_does(kind: str) -> None:
    bound = lower_bound_seconds(_ring(4), kind, range(4), 1e6, ports=_ports(4))
    assert bound == pytest.approx(1e-4 + busbw_factor(kind, 4) * 0.08)


def test_directions_may_differ() -> None:
    links = [((0, 1), LINK), ((1, 0), SLOW)]
    assert lower_bound_seconds(links, "send", (0, 1), 1e6) == pytest.approx(1e-4 + 0.08)
    assert lower_bound_seconds(links, "send", (1, 0), 1e6) == pytest.approx(5e-4 + 0.8)
    near = lower_bound_seconds(links, "send", (0, 1), 1)
    assert near == pytest.approx(1e-4, rel=1e-3), "nothing comes back, so that the way back is no matter"
    assert lower_bound_seconds(links[:1], "send", (1, 0), 1e6) == pytest.approx(1e-4 + 0.08), "one stands for both"


def shaped(link: str, hosts: int = 4, shaper: str = "switch", **own: str) -> RunRecord:
    """What a run's record says of its network; `h2="10mbit"`: host 2's own link."""
    own = {host[1:]: text for host, text in own.items()}
    links = {int(host): parse_link(text) for host, text in own.items()}
    rates = Topology(parse_link(link)).with_links(links).rates(hosts)
    network = {"link": link, "own": own, "rates": rates, "mtu": 1500, "shaper": shaper}
    return record_of(hosts=hosts, network=network)


def streams(record: RunRecord) -> list[tuple[tuple[int, int], LinkFit]]:
    """What single streams show around the ring, in both directions: the slower end of each pair."""
    assert record.network is not None
    assert record.network["rates"] is not None
    rates, hosts = record.network["rates"], record.hosts
    pairs = [(host, (host + step) % hosts) for host in range(hosts) for step in (1, -1)]
    return [((a, b), LinkFit(0.0, 1 / (GOOD * min(rates["up"][a], rates["down"][b])))) for a, b in pairs]


@pytest.mark.parametrize(
    ("record", "kind", "size", "shares", "least"),
    [
        # 256 KiB out of three ports of 10 Mbit/s at once, into one of 100: a quarter through each.
        (shaped("up 10mbit down 100mbit"), "gather", 2**18, (), 2**16 / (GOOD * 1.25e6)),
        (shaped("up 100mbit down 10mbit"), "scatter", 2**18, (), 2**16 / (GOOD * 1.25e6)),
        (shaped("up 10mbit down 100mbit"), "all_to_all", 252 * 1024, (6, 1, 1, 1), 8 * 28 * 1024 / (GOOD * 1.25e6)),
        (shaped("up 100mbit down 10mbit"), "all_to_all", 252 * 1024, (6, 1, 1, 1), 2 * 252 * 1024 / (GOOD * 1.25e6)),
        # Host 0 has 100 Mbit/s, and both of its neighbors on the ring 10.
        (shaped("100mbit", h1="10mbit", h3="10mbit"), "gather", 2**18, (), 2**16 / (GOOD * 1.25e6)),
        (shaped("100mbit", h1="10mbit", h3="10mbit"), "broadcast", 2**18, (), 2**18 / (GOOD * 1.25e6)),
        # 6 S through ports that send 110 + 110 + 20 = 240 Mbit/s together; and S through the slowest.
        (shaped("100mbit", h1="10mbit", h3="10mbit"), "all_reduce", 2**18, (), 2**18 / (GOOD * 1.25e6)),
        (shaped("up 10mbit down 100mbit"), "all_reduce", 2**18, (), 1.5 * 2**18 / (GOOD * 1.25e6)),
        (shaped("up 100mbit down 10mbit"), "all_reduce", 2**18, (), 1.5 * 2**18 / (GOOD * 1.25e6)),
        (shaped("100mbit", h1="10mbit"), "sendrecv", 2**18, (), 2**18 / (GOOD * 1.25e6)),
    ],
)  # fmt: skip
def test_a_port_with_several_partners_carries_what_its_shaper_lets_pass(
    record: RunRecord, kind: str, size: int, shares: tuple[int, ...], least: float
) -> None:
    links = streams(record)
    ports = shaped_ports(record, links)
    assert lower_bound_seconds(links, kind, range(4), size, shares, ports) == pytest.approx(least)


def test_where_no_shaper_is_known_a_stream_bounds_a_pair_and_nothing_else() -> None:
    links = [((a, b), LINK) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))]
    assert shaped_ports(record_of(hosts=4), links) is None
    for kind in set(KINDS) - {"send", "sendrecv"}:
        assert lower_bound_seconds(links, kind, range(4), 1e6) is None, "several streams may pass its port at once"
        assert lower_bound_seconds(links, kind, (1, 2), 1e6) is not None
    assert lower_bound_seconds(links, "sendrecv", range(4), 1e6) == pytest.approx(1e-4 + 0.08)
    assert lower_bound_seconds(links, "send", (0, 2), 1e6) is None, "nobody has measured it"


def test_iterations_in_a_row_share_their_latency() -> None:
    for kind in ("send", "all_reduce"):
        one, ten = (lower_bound_seconds(_ring(2), kind, (0, 1), 1e6, iterations=k) for k in (1, 10))
        assert one == pytest.approx(1e-4 + 0.08)
        assert ten == pytest.approx(1e-5 + 0.08), "the second leaves while the first is under way"


def test_a_bucket_of_bytes_passes_at_once() -> None:
    ports = shaped_ports(shaped("1gbit burst 64kb", 2, "tbf"), [])
    assert ports is not None
    burst = GOOD * parse_link("1gbit burst 64kb").burst
    assert lower_bound_seconds([], "send", (0, 1), 0.9 * burst, ports=ports) == 0
    assert lower_bound_seconds([], "send", (0, 1), burst + 1e5, ports=ports) == pytest.approx(1e5 / (GOOD * 125e6))


def test_a_delay_counts_in_its_own_direction_and_at_its_least() -> None:
    record = shaped("1gbit", 2, h0="up 1gbit delay 30ms down 1gbit delay 10ms")
    ports = shaped_ports(record, [((0, 1), LinkFit(0.0301, 8e-9)), ((1, 0), LinkFit(0.0101, 8e-9))])
    assert ports is not None
    assert ports.latencies[0, 1] == pytest.approx(0.0301)
    assert ports.latencies[1, 0] == pytest.approx(0.0101)
    jittery = shaped_ports(shaped("1gbit delay 20ms jitter 5ms", 2), [((0, 1), LinkFit(0.018, 8e-9))])
    assert jittery is not None
    assert jittery.latencies[0, 1] == pytest.approx(0.015), "what is measured above it may be luck"


def test_of_links_that_a_scenario_may_have_changed_nobody_knows_the_bound() -> None:
    assert not shaped("10mbit", 2).links_changed
    network = {"shaper": "switch", "link": "10mbit", "rates": None}  # as `Machines(changes=True)` describes itself
    assert record_of(hosts=2, network=network).links_changed
    transfers = (Transfer("t", 2**19, "send", ranks=(0, 1)),)
    slow = [{"from": 0, "to": 1, "latency_seconds": 0.0, "bytes_per_second": GOOD * 1.25e6}]
    of: dict[str, Any] = {"transfers": transfers, "hosts": 2, "links": slow}
    fast = np.full((12, 1), 0.05)  # at the 100 Mbit/s of the second half
    assert results(run_of(fast, **of, network=network))["transfers"][0]["ideal_percent"] is None
    assert results(run_of(fast, **of))["transfers"][0]["ideal_percent"] > 100
