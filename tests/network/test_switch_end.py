"""The end of the switch is told, and nothing is left. That it goes when its maker does: test_namespaces.py."""

from __future__ import annotations

import os
import signal

import pytest
from makers import marked

from penstock._base.errors import FabricError
from penstock.network import reaper
from penstock.network.machines import Machines
from penstock.network.namespaces import why_not
from penstock.network.parse import parse_link
from penstock.network.shapers import why_no_switch
from penstock.network.switch import client
from penstock.network.topology import State

_MISSING = why_not() or why_no_switch()
pytestmark = [pytest.mark.alone, pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))]


def test_a_switch_that_is_killed_is_named_and_the_hosts_go() -> None:
    made = Machines(2, parse_link("100mbit delay 5ms"), changes=True)
    with made:
        assert made._switch is not None
        made._switch._process.kill()
        with pytest.raises(FabricError, match="the switch has ended"):
            made.counters()
        with pytest.raises(FabricError, match="the switch has ended"):
            made.change(State(made.topology, gone=(1,)))
    assert reaper.list_namespaces(made.id) == []


def test_a_switch_that_does_not_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ANSWER_SECONDS", 0.5)
    made = Machines(2, parse_link("100mbit delay 5ms"))
    with made:
        assert made._switch is not None
        os.kill(made._switch._process.pid, signal.SIGSTOP)
        with pytest.raises(FabricError, match="the switch does not answer"):
            made.counters()
    assert reaper.list_namespaces(made.id) == []


_REFUSES = "import multiprocessing.connection as mc; mc.Connection(0).send({'error': 'Operation not permitted'})"


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("raise SystemExit('no such luck')", "the switch has ended: no such luck"),
        (_REFUSES, "cannot create the devices of the hosts: Operation not permitted"),
    ],
)
def test_a_switch_that_cannot_start_says_why_and_nothing_is_left(
    program: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PROGRAM", ("-c", program))
    made = Machines(2, parse_link("100mbit delay 5ms"))
    with pytest.raises(FabricError, match=said), made:
        pass
    assert reaper.list_namespaces(made.id) == []
    assert not marked(os.getpid())
