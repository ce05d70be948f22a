"""No arrangement of the devices sends less over links between hosts."""

import math
from itertools import permutations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.plan import Cluster, DevicePool
from penstock.plan.layout import MAX_EXACT_DEVICES, Traffic, assign_devices, assign_pools, inter_host_bytes
from penstock.simulate import LinkCost

FAR = LinkCost(1e-3, 1e9)
_SIZES = st.sampled_from([0, 1, 3, 10, 100])


@st.composite
def jobs(draw: st.DrawFn, most: int) -> tuple[int, int, int, Traffic]:
    replicas, ranks = draw(st.sampled_from([(a, b) for a in range(1, 5) for b in range(1, 7) if 2 <= a * b <= most]))
    per_host = draw(st.integers(1, replicas * ranks - 1))
    pairs = [(a, b) for a in range(ranks) for b in range(a + 1, ranks)]
    messages = {pair: float(draw(_SIZES)) for pair in pairs if pair[1] == pair[0] + 1 or draw(st.booleans())}
    return replicas, ranks, per_host, Traffic(messages, [float(draw(_SIZES)) for _ in range(ranks)])


def _hosts(grid: np.ndarray, per_host: int) -> np.ndarray:  # type: ignore[type-arg]
    return grid // per_host


def _by_hand(hosts: list[list[int]], traffic: Traffic) -> float:
    """Message by message, and each ring walked once around."""
    total = sum(size for row in hosts for (a, b), size in traffic.messages.items() if row[a] != row[b])
    for rank, size in enumerate(traffic.gradients):
        ring = sorted(row[rank] for row in hosts)
        edges = sum(one != other for one, other in zip(ring, [*ring[1:], ring[0]], strict=True))
        total += edges * 2 * (len(ring) - 1) / len(ring) * size
    return total


@settings(max_examples=60, deadline=None)
@given(jobs(6))
def test_no_arrangement_sends_less_between_hosts(job: tuple[int, int, int, Traffic]) -> None:
    replicas, ranks, per_host, traffic = job
    cluster = Cluster(replicas * ranks, devices_per_host=per_host, inter_host_link=FAR)
    (kinds,) = assign_pools(cluster, replicas, ranks)
    found = assign_devices(cluster, kinds, traffic)
    assert sorted(found.ravel().tolist()) == [*range(cluster.devices)]
    least = math.inf
    for order in permutations(range(cluster.devices)):
        grid = np.array(order).reshape(replicas, ranks)
        least = min(least, _by_hand(_hosts(grid, per_host).tolist(), traffic))
    assert math.isclose(_by_hand(_hosts(found, per_host).tolist(), traffic), least)
    assert math.isclose(inter_host_bytes(_hosts(found, per_host), traffic), least)


def test_beyond_the_exact_a_host_is_a_rectangle() -> None:
    """Four hosts of four devices, four replicas of four ranks: two by two sends least."""
    cluster = Cluster(16, devices_per_host=4, inter_host_link=FAR)
    assert cluster.devices > MAX_EXACT_DEVICES
    (kinds,) = assign_pools(cluster, 4, 4)
    traffic = Traffic({(0, 1): 1.0, (1, 2): 0.1, (2, 3): 1.0}, [0.5] * 4)
    found = assign_devices(cluster, kinds, traffic)
    assert found.tolist()[0] == [0, 1, 4, 5]
    assert found[:2, :2].ravel().tolist() == [0, 1, 2, 3]


def test_ranks_of_one_kind_follow_each_other() -> None:
    cluster = Cluster(
        kinds=(DevicePool("old", 4, speed=0.5), DevicePool("new", 4)), devices_per_host=4, inter_host_link=FAR
    )
    ways = assign_pools(cluster, 2, 4)
    assert sorted(way[0].tolist() for way in ways) == [[0, 0, 1, 1], [1, 1, 0, 0]]
    found = assign_devices(cluster, ways[1], Traffic({(0, 1): 1.0, (1, 2): 1.0, (2, 3): 1.0}, [5.0] * 4))
    assert sorted(found[:, 0].tolist() + found[:, 1].tolist()) == [4, 5, 6, 7]
