"""The switch goes when its maker does, however that ends, and its own end is told."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from makers import wait_until

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

MAKER = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background has it ignored
from penstock.network.machines import Machines
from penstock.network.parse import parse_link
from penstock.network.topology import State
print("loaded", flush=True)
with Machines(3, parse_link("100mbit delay 5ms"), changes=True) as made:
    sends = "import socket\\ns = socket.socket(2, 2)\\nwhile True: s.sendto(bytes(999), ('%s', 9))" % made.addresses[1]
    sender = subprocess.Popen(made.command(0, [sys.executable, "-S", "-c", sends]), start_new_session=True)
    while made.counters()["frames"] < 10:
        time.sleep(0.01)
    print("runs", flush=True)
    while True:
        for host in (1, 2):
            made.change(State(made.topology.with_links({host: made.topology.link})))
"""


def _marked(maker: int) -> Iterator[str]:
    """Processes of emulations of this maker."""
    mark = f"{reaper.MARK}=penstock-{maker}-".encode()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (process / "environ").read_bytes():
                yield (process / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue


def _names(maker: int) -> list[str]:
    return [name for name in reaper.list_namespaces() if name.startswith(f"penstock-{maker}-")]


def _is_up(maker: int, what: str) -> bool:
    return any(what in line for line in _marked(maker))


MOMENTS: dict[str, Callable[[int], bool]] = {
    "the first host": lambda maker: bool(_names(maker)),
    "the switch starts": lambda maker: _is_up(maker, "switch.serve"),
    "a command in a host": lambda maker: _is_up(maker, "-batch"),
}


@pytest.mark.parametrize("moment", [*MOMENTS, "frames pass", "frames pass, Ctrl-C", "frames pass, SIGTERM"])
def test_nothing_outlives_a_maker_with_a_switch(moment: str) -> None:
    devices = os.listdir("/sys/class/net")
    process = subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    with process.stdout as said:
        try:
            said.readline()
            if moment in MOMENTS:
                # A moment that was missed is a later one.
                wait_until(lambda: MOMENTS[moment](process.pid) or bool(select.select([said], [], [], 0)[0]))
            else:
                assert said.readline() == b"runs\n"
                assert _is_up(process.pid, "switch.serve")
        finally:
            how = signal.SIGINT if "Ctrl" in moment else signal.SIGTERM if "TERM" in moment else signal.SIGKILL
            process.send_signal(how)
            try:
                process.wait(60)
            finally:
                process.kill()
                process.wait()
    wait_until(lambda: not _names(process.pid))
    wait_until(lambda: not list(_marked(process.pid)))
    time.sleep(0.3)
    assert not _names(process.pid)
    assert not list(_marked(process.pid))
    assert os.listdir("/sys/class/net") == devices


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
    assert not list(_marked(os.getpid()))
