"""Hosts in network namespaces: they are separate machines to a job, and nothing of them outlives their maker."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from makers import is_gone, maker, marked, wait_until

from penstock._base.errors import FabricError
from penstock.network import namespaces, reaper
from penstock.network.machines import Machines, clean
from penstock.network.namespaces import why_not, within
from penstock.network.parse import parse_link
from penstock.network.shapers import why_no_switch
from penstock.network.switch import client
from penstock.network.topology import State

pytestmark = pytest.mark.alone

_MISSING = why_not()
hosts_needed = pytest.mark.skipif(_MISSING is not None, reason=str(_MISSING))
_NO_SWITCH = _MISSING or why_no_switch()
switch_needed = pytest.mark.skipif(_NO_SWITCH is not None, reason=str(_NO_SWITCH))


def _in(host: str, command: str) -> str:
    line = ["ip", "netns", "exec", host, *command.split()]
    return subprocess.run(line, check=True, capture_output=True, text=True).stdout


def _devices() -> set[str]:
    return {name for _, name in socket.if_nameindex()}


@hosts_needed
def test_hosts_talk_to_each_other_and_the_machine_gets_no_device() -> None:
    before = _devices()
    receive = "import socket, sys; s = socket.create_server((sys.argv[1], 5000)); print(flush=True)\n"
    receive += "c, _ = s.accept(); print(c.recv(5).decode())"
    send = (
        "import os, socket, sys; assert os.environ['GLOO_SOCKET_IFNAME'] == os.environ['TP_SOCKET_IFNAME'] == 'eth0'\n"
    )
    send += "assert os.environ['MORE'] == '1'; socket.create_connection((sys.argv[1], 5000)).sendall(b'hello')"
    with Machines(3, parse_link("100mbit mtu 4000")) as made:
        assert _devices() == before
        to = made.addresses[2]
        receiver = subprocess.Popen(
            made.command(2, [sys.executable, "-W", "ignore", "-c", receive, to]), stdout=subprocess.PIPE, text=True
        )
        assert receiver.stdout is not None
        with receiver, receiver.stdout as answer:
            answer.readline()
            line = made.command(0, [sys.executable, "-W", "ignore", "-c", send, to], {"MORE": "1"})
            subprocess.run(line, check=True, timeout=30)
            assert answer.readline() == "hello\n"
        for host in made.hosts:
            assert "rate 100Mbit burst 86" in _in(host, "tc qdisc show dev eth0")
            assert "LOWER_UP" in _in(host, "ip link show lo")
            assert "mtu 4000" in _in(host, "ip link show eth0")
        assert _in(f"{made.id}-switch", "tc qdisc show").count("tbf") == 3
        first = within(reaper.FOLDER / made.hosts[0], _devices)
        assert first == {"lo", "eth0"}
        assert _devices() == before
    assert reaper.list_namespaces(made.id) == []


@hosts_needed
def test_two_emulations_at_once_do_not_collide() -> None:
    with Machines(2) as one, Machines(2) as other:
        assert one.id != other.id
        assert len(reaper.list_namespaces(one.id)) == len(reaper.list_namespaces(other.id)) == 3
        one.close()
        one.close()
        assert reaper.list_namespaces(one.id) == []
        assert len(reaper.list_namespaces(other.id)) == 3


WAYS = [signal.SIGKILL, "fork", signal.SIGINT, signal.SIGTERM, "raise"]
SWITCH_ENDS = [
    pytest.param(way, ("switch",), marks=[switch_needed, *[pytest.mark.long] * (way in WAYS[2:])]) for way in WAYS
]


@hosts_needed
@pytest.mark.parametrize(("how", "switch"), [*((way, ()) for way in WAYS), *SWITCH_ENDS])
def test_nothing_outlives_the_maker(how: signal.Signals | str, switch: tuple[str, ...]) -> None:
    devices = _devices()
    with maker(*[how] if isinstance(how, str) else [], *switch) as (process, emulation, worker, keeps):
        if how != "raise":
            assert len(reaper.list_namespaces(emulation)) == 3 - len(switch), "or nothing can outlive it"
            assert all(reaper.start_ticks(pid) is not None for pid in (worker, keeps))
            process.send_signal(signal.SIGKILL if how == "fork" else how)
        process.wait(30)
        wait_until(lambda: is_gone(emulation))
        wait_until(lambda: all(reaper.start_ticks(pid) is None for pid in (worker, keeps)))
        wait_until(lambda: not marked(process.pid))
    assert _devices() == devices


SWITCHED = '3, parse_link("100mbit delay 5ms")'


@hosts_needed
@pytest.mark.parametrize(
    ("machines", "made"),
    [("12", 1), ("12", 4), ("12", 12), *(pytest.param(SWITCHED, made, marks=switch_needed) for made in (1, 3))],
)
def test_a_maker_that_is_killed_while_it_makes_leaves_nothing(machines: str, made: int) -> None:
    """Of three hosts with a switch, it starts the switch after the third."""
    imports = "from penstock.network.machines import Machines\nfrom penstock.network.parse import parse_link"
    program = f"{imports}\nMachines({machines}).__enter__()\nimport time; time.sleep(60)"
    process = subprocess.Popen([sys.executable, "-c", program])
    mine = f"penstock-{process.pid}-"

    def names() -> list[str]:
        return [name for name in reaper.list_namespaces() if name.startswith(mine)]

    try:
        wait_until(lambda: len(names()) >= made)
    finally:
        process.kill()
        process.wait()
    wait_until(lambda: not names() and not marked(process.pid))
    time.sleep(0.2)
    assert not names()
    assert not marked(process.pid)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the Linux kernel")
def test_a_maker_is_told_from_another_process_that_got_its_number() -> None:
    start = reaper.start_ticks(os.getpid())
    assert start is not None
    assert reaper.maker_lives(f"penstock-{os.getpid()}-{start}-0")
    assert not reaper.maker_lives(f"penstock-{os.getpid()}-{start + 1}-0")


@hosts_needed
def test_clean_removes_leftovers_of_dead_makers_only() -> None:
    stranger = "penstock-of-somebody-else"
    subprocess.run(["ip", "netns", "add", stranger], check=True)
    try:
        with maker() as (living, alive, _, _), maker() as (process, emulation, sleeper, keeps):
            os.kill(keeps, signal.SIGKILL)
            process.kill()
            assert len(reaper.list_namespaces(emulation)) == 3
            # Not yet waited for: a zombie is as good as gone.
            wait_until(lambda: not reaper.maker_lives(emulation))
            removed = clean()
            assert set(removed) >= {f"{emulation}-h0", f"{emulation}-h1", f"{emulation}-switch"}
            assert reaper.list_namespaces(emulation) == []
            assert reaper.start_ticks(sleeper) is None
            assert len(reaper.list_namespaces(alive)) == 3
            assert living.poll() is None
        assert (reaper.FOLDER / stranger).exists()
    finally:
        subprocess.run(["ip", "netns", "delete", stranger], check=True)


@hosts_needed
def test_clean_by_force_removes_a_running_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with Machines(1) as made:
        everything = reaper.list_namespaces
        # Another's emulation may run on this machine while this test does.
        monkeypatch.setattr(reaper, "list_namespaces", lambda owner=None: everything(owner or made.id))
        assert clean() == []
        assert sorted(clean(force=True)) == [f"{made.id}-h0", f"{made.id}-switch"]


@hosts_needed
def test_hosts_are_removed_even_if_the_reaper_was_killed() -> None:
    with Machines(1) as made:
        assert made._reaper is not None
        made._reaper.kill()
    assert reaper.list_namespaces(made.id) == []


@hosts_needed
def test_a_command_that_fails_is_named_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machines, "_host_lines", lambda self, host: ["link set dev nothing up"])
    made = Machines(2)
    with pytest.raises(FabricError, match=r"(?s)ip -n \S+-h0 -batch.*nothing"), made:
        pass
    assert reaper.list_namespaces(made.id) == []


@pytest.mark.parametrize(
    ("lacking", "said"),
    [
        ({"sys.platform": "darwin"}, "only Linux has; this is darwin"),
        ({"os.geteuid": lambda: 1000}, "root; this is user 1000: run it with sudo"),
        ({"_effective_capabilities": lambda: ~(1 << 12)}, "need CAP_NET_ADMIN: .* --privileged"),
        ({"tool": lambda name: "/none" if name == "ip" else "/bin/true"}, "no `ip` on this machine: .* iproute2"),
        ({"tool": lambda name: "/none" if name == "tc" else "/bin/true"}, "no `tc` on this machine: .* iproute2"),
    ],
)
def test_what_is_missing_is_named(lacking: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"sys.platform": "linux", "os.geteuid": lambda: 0, "_effective_capabilities": lambda: -1}
    for name, value in (here | lacking).items():
        monkeypatch.setattr(f"penstock.network.namespaces.{name}", value)
    assert re.search(said, str(why_not()))
    with pytest.raises(FabricError, match=said), Machines(2):
        pass


@hosts_needed
@pytest.mark.parametrize(
    ("kind", "module"),
    [("type bridge", "modprobe bridge"), ("type veth", "modprobe veth"), ("tbf", "modprobe sch_tbf")],
)
def test_what_the_kernel_lacks_is_named(
    kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ip", "tc"):
        program = tmp_path / name
        refuse = f'case "$*" in *"{kind}"*) echo "Error: Unknown device type." >&2; exit 2;; esac\n'
        program.write_text(f'#!/bin/sh\n{refuse}exec {reaper.tool(name)} "$@"\n')
        program.chmod(0o755)
    monkeypatch.setattr(namespaces, "tool", lambda name: str(tmp_path / name))
    before = _devices()
    assert module in str(why_not())
    assert "Unknown device type" in str(why_not())
    assert _devices() == before


# -- the end of the switch --------------------------------------------------------------------------------------------


@switch_needed
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


@switch_needed
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


@switch_needed
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
