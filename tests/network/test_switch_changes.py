"""What the switch does when the network changes."""

from __future__ import annotations

import socket

import pytest

from penstock.network.parse import parse_link
from penstock.network.switch import columns, serve
from penstock.network.switch.client import Setup
from penstock.network.topology import State, Topology


def test_what_stays_the_same_is_not_drawn_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    pairs = [socket.socketpair(type=socket.SOCK_DGRAM) for _ in range(3)]
    ours = iter(pairs)
    monkeypatch.setattr(serve, "open_tap", lambda interface, name: next(ours)[0].fileno())
    monkeypatch.setattr(serve, "Unread", lambda interface, name: None)
    topology = Topology(parse_link("100mbit delay 1ms"), seed=7)
    served = serve.SwitchServer(Setup(("a", "b", "c"), "eth0", State(topology, background=("1mbit",))))
    decided, background = served._decisions, served._background
    served.change(State(Topology(parse_link("100mbit delay 1ms"), seed=7), gone=(1,), background=("1mbit",)))
    assert served._decisions is decided
    assert served._background is background
    assert served.tables.lines[:3, columns.GONE].tolist() == [0, 1, 0]
    served.change(State(topology.with_links({1: parse_link("10mbit")}), background=("1mbit",)))
    assert served._decisions is not decided
    assert served._background is background
    assert served.tables.lines[:3, columns.GONE].tolist() == [0, 0, 0]
    for pair in pairs:
        for end in pair:
            end.close()
