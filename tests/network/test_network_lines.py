"""What is said of a network at the end of a run: what made it, what became of its frames, whether it kept up."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.network.fabric.views.network import network_lines, saturated
from penstock.network.parse import parse_link
from penstock.network.switch import columns, filling
from penstock.network.topology import Topology


def told(hosts: int = 2, **changed: Any) -> dict[str, Any]:
    """Of a network on which little happened."""
    t = filling.create_tables(Topology(parse_link("1gbit")), [-1] * hosts, time.monotonic_ns())
    t.lines[:, columns.FRAMES], t.lines[:, columns.BYTES] = 1200, 1_500_000
    t.lines[0, columns.N_LOST] = 12
    t.lines[hosts + 1, columns.N_FULL], t.lines[hosts + 1, columns.NEAR_BYTES] = 3, 2_500_000
    t.state[columns.LATE + 4 * 12], t.state[columns.WORST_NS] = 1000, 5000  # 4.1 us
    t.state[columns.BUSY_NS] = 100_000_000
    return {"priority": "real-time", **filling.counters(t), "seconds": 10.0, **changed}


def described(hosts: int, shaper: str | None = "switch", link: str | None = "1gbit", **more: Any) -> dict[str, Any]:
    """As `Machines.describe` has it."""
    usual: dict[str, Any] = {"own": {}, "background": [], "slow": {}, "remarks": []}
    return {"hosts": hosts, "shaper": shaper, "link": link, **usual, **more}


def test_every_fact_is_a_line() -> None:
    network = described(
        2,
        link="100mbit loss 1%",
        own={"1": "10mbit"},
        background=["5mbit to 1"],
        slow={"0": 0.25},
        held_back_by="cgroup v1",
        remarks=["frames carry 9000 bytes"],
    )
    lines = network_lines(network, counters=told(), events=["3.0 s, step 5: host = 1, gone = True"])
    assert lines == [
        "network    2 hosts, 100mbit loss 1%, by a switch in user space (priority: real-time)",
        "host 1     link 10mbit",
        "host 0     held to 0.25 of a core, by cgroup v1",
        "neighbor   5mbit to 1",
        "           frames carry 9000 bytes",
        "change     3.0 s, step 5: host = 1, gone = True",
        "host 0     out 1,200 frames, 1.5 MB (12 lost); in 1,200 frames, 1.5 MB",
        "host 1     out 1,200 frames, 1.5 MB; in 1,200 frames, 1.5 MB (3 dropped because the queue was "
        "full); neighbors 2.5 MB",
        "switch     p50 4.87us, p99 4.87us, worst 5.00us: how late frames left",
    ]


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, None),
        ({"late": {"p50": 1e-4, "p99": 0.9e-3, "worst": 0.5}}, None),
        ({"late": {"p50": 1e-4, "p99": 2e-3, "worst": 0.5}}, "1% of the frames left more than 2.00ms late"),
        ({"no_room": 5}, "it ran out of memory for a frame 5 times"),
        ({"busy_seconds": 8.9}, None),
        ({"busy_seconds": 9.1}, "it was busy for 91% of the time"),
    ],
)
def test_switch_that_could_not_keep_up_is_called_saturated(changed: dict[str, Any], says: str | None) -> None:
    found = told(**changed)
    reason = saturated(found)
    lines = network_lines(described(2), counters=found)
    assert lines[-1].startswith("warning: the switch was saturated: ") == (says is not None)
    if says is None:
        assert reason is None
    else:
        assert says in str(reason)
        assert "pass a lower rate" in lines[-1]
