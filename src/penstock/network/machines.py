"""Emulate hosts on one machine: a network namespace each, joined by shaped links to a switch.

The switch is either a bridge in its own namespace, with veth pairs that tbf shapes, or a process (switch/) that holds
the hosts' TAP devices: see shapers.py. The machine's own namespace gets no device, address or route. For measurements
of the links see link.py.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from penstock._base.errors import ArgumentError, FabricError
from penstock.network import MAX_HOSTS, reaper
from penstock.network.background import parse_background
from penstock.network.cpu_limit import CpuLimiter, limit_cpu
from penstock.network.link import Link
from penstock.network.namespaces import set_up, why_not, within
from penstock.network.quantities import check_host
from penstock.network.shapers import AUTO, Shaper, choose
from penstock.network.switch.client import Setup, Switch
from penstock.network.topology import State, Topology

INTERFACE = "eth0"
"""The interface that each host has besides lo."""


class Machines:
    """Hosts that exist while the `with` block runs, and never outlive the process that made them, however it ends.

        with Machines(4, parse_link("100mbit")) as machines:
            subprocess.run(machines.command(0, ["python", "-c", "..."]))

    Attributes:
        id: of this emulation; its namespaces are called `{id}-h0`, ... and `{id}-switch`.
        hosts: the names of the hosts' namespaces.
        addresses: IPv4 addresses, by host; those of two emulations are the same, since neither can reach the other.
        topology: the current links; None for links as fast as the machine can make them.
        shaper: what shapes the links; None if nothing does.
        background: the neighbors' current traffic.
    """

    def __init__(
        self,
        hosts: int,
        link: Link | Topology | None = None,
        *,
        shaper: str = AUTO,
        background: Sequence[str] = (),
        slow: Mapping[int, float] | None = None,
        changes: bool = False,
    ) -> None:
        """Check the arguments; the hosts are created by `with`.

        Args:
            link: each host's link to the switch, or all links as a Topology; None for links as fast as the machine can
                make them.
            shaper: one of `shapers.SHAPERS`.
            background: neighbors' traffic, as texts (background.py).
            slow: hosts whose processes together get at most this share of one core's time: see `parse_slow`.
            changes: whether `change` will be called.

        Raises:
            ArgumentError: there are too few or too many hosts, or a link is given for a host that does not exist.
        """
        if not 1 <= hosts <= MAX_HOSTS:
            raise ArgumentError(f"{hosts} hosts requested: pass 1 to {MAX_HOSTS}")
        for text in background:
            parse_background(text, hosts)
        self.topology = Topology(link) if isinstance(link, Link) else link
        for host in self.topology.host_links if self.topology is not None else ():
            check_host(host, hosts)
        if self.topology is None and (background or changes):
            raise ArgumentError("neighbors and changes need links with a rate: pass --link 1gbit, for example")
        self.shaper: Shaper | None = None
        self._requested_shaper = shaper
        self.background = tuple(background)
        self._changes = changes
        self._switch: Switch | None = None
        self.slow = dict(slow or {})
        self.id = ""
        self.hosts: tuple[str, ...] = ()
        self.addresses: tuple[str, ...] = ()
        self._count = hosts
        self._maker = 0
        self._reaper: subprocess.Popen[bytes] | None = None
        self._cpu_limiter: CpuLimiter | None = None

    def __enter__(self) -> Self:
        """Create the hosts. Raise FabricError: this machine cannot create them (`why_not` says why), or a command
        failed. Nothing is left behind. Raise ArgumentError: the link cannot be made at this rate, or by the requested
        shaper."""
        self.check_support()
        self._maker = os.getpid()
        self.id = f"penstock-{self._maker}-{reaper.start_ticks(self._maker)}-{secrets.randbelow(10**9)}"
        self.hosts = tuple(f"{self.id}-h{host}" for host in range(self._count))
        self.addresses = tuple(f"10.64.0.{host + 1}" for host in range(self._count))
        self._reaper = start_reaper(self.id, self._maker)
        try:
            # Before the hosts, so that nothing of them is created if they cannot be throttled.
            self._cpu_limiter = limit_cpu(self.id, self.slow) if self.slow else None
            self._create()
        except BaseException:
            self.close()
            raise
        return self

    def check_support(self) -> None:
        """Find out whether and how this machine can create the hosts, without creating any. Raise FabricError,
        ArgumentError: as in `with`."""
        if (missing := why_not()) is not None:
            raise FabricError(missing)
        only_switch = "only the switch can change links, and disconnect hosts for a time" if self._changes else None
        if self.background:
            only_switch = "only the switch models neighbors' traffic"
        if self.topology is not None:
            self.shaper = choose(self.topology, self._count, self._requested_shaper, only_switch)
            self.topology = self.shaper.topology

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs on the hosts, and remove them. May be called again. Raise FabricError if any is left."""
        if self._reaper is None or os.getpid() != self._maker:  # only the maker closes, not a process forked from it
            return
        if self._switch is not None:
            self._switch.close()
            self._switch = None
        process = self._reaper
        assert process.stdin is not None
        process.stdin.close()
        status = process.wait()
        self._reaper = None
        if status:  # the reaper was killed, or failed
            reaper.remove(self.id)
        for command, remaining in (
            ("ip netns delete", reaper.list_namespaces(self.id)),
            ("rmdir", [str(group) for group in reaper.list_cgroups(self.id)]),
        ):
            if remaining:
                raise FabricError(f"{', '.join(remaining)} cannot be removed: try `{command} {remaining[0]}`")

    def command(self, host: int, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """Return the command that runs `argv` on a host, with `environment` in addition to what tells gloo and others
        which interface to use."""
        names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        variables = {reaper.MARK: self.id, **dict.fromkeys(names, INTERFACE), **(environment or {})}
        added = [f"{name}={value}" for name, value in variables.items()]
        prefix = [reaper.tool("ip"), "netns", "exec", self.hosts[host], "env", *added]
        if host in self.slow and self._cpu_limiter is not None:
            return self._cpu_limiter.command(host, prefix, argv)
        return [*prefix, *argv]

    def check(self) -> None:
        """Check that the network is still there. Raise FabricError: the switch process has ended."""
        if self._switch is not None:
            self._switch.check()

    def counters(self) -> dict[str, Any] | None:
        """Return the counters of the user-space switch; None without one."""
        if self._switch is None:
            return None
        return {"priority": self._switch.priority, **self._switch.counters()}

    def change(self, state: State) -> None:
        """Make the network like this from now on, at its frame size; frames in flight are not affected. Raise
        ArgumentError: the links would need another frame size. Raise FabricError: the switch has ended."""
        assert self._switch is not None, "Machines(changes=True) has a switch"
        assert self.topology is not None
        before, links = self.topology, state.topology.with_mtu(self.topology.mtu)
        self._switch.change(replace(state, topology=links))
        self.topology, self.background = links, state.background
        for host, name in enumerate(self.hosts):
            if self.topology.up(host) != before.up(host):
                self._batch("tc", name, [f"qdisc change dev {INTERFACE} root {self._egress(host)}"])

    def describe(self) -> dict[str, Any]:
        """Describe what was requested and what currently implements it, for the record."""
        topology, shaper = self.topology, self.shaper
        return {
            "hosts": self._count,
            "shaper": None if shaper is None else shaper.name,
            "remarks": [] if shaper is None else list(shaper.remarks),
            "link": None if topology is None else str(topology.link),
            "own": {} if topology is None else {str(host): str(link) for host, link in topology.host_links.items()},
            "rates": None if topology is None or self._changes else topology.rates(self._count),
            "seed": None if topology is None else topology.seed,
            "mtu": self._mtu,
            "background": list(self.background),
            "slow": {str(host): share for host, share in self.slow.items()},
            "held_back_by": None if self._cpu_limiter is None else self._cpu_limiter.name,
        }

    def _create(self) -> None:
        by_process = self.shaper is not None and self.shaper.name == "switch"
        for name in (*self.hosts, *(() if by_process else (f"{self.id}-switch",))):
            self._run("ip", "netns", "add", name)
            within(reaper.FOLDER / name, set_up)
        if by_process and self.topology is not None:
            state = State(self.topology, background=self.background)
            namespaces = tuple(str(reaper.FOLDER / name) for name in self.hosts)
            self._switch = Switch(Setup(namespaces, INTERFACE, state), {reaper.MARK: self.id})
        else:
            self._create_bridge()
        for host, name in enumerate(self.hosts):
            self._batch("ip", name, self._host_lines(host))
            if self.topology is not None:
                self._batch("tc", name, [f"qdisc replace dev {INTERFACE} root {self._egress(host)}"])

    def _egress(self, host: int) -> str:
        """Return tc's arguments to shape a host's traffic. A switch needs this too: TCP must notice its own queue."""
        assert self.topology is not None
        assert self.shaper is not None
        return self.topology.up(host).host_tbf(exact=self.shaper.name == "switch")

    def _create_bridge(self) -> None:
        switch = f"{self.id}-switch"
        ports = [f"p{host}" for host in range(self._count)]
        # No spanning tree and no snooping: they would delay or add frames. Device addresses never expire.
        lines = ["link add name br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0 ageing_time 100000000"]
        for host, port in enumerate(ports):
            lines += [
                f"link add name {port} mtu {self._mtu} type veth peer name {INTERFACE} netns {self.hosts[host]}",
                f"link set dev {port} master br0 up",
            ]
        self._batch("ip", switch, [*lines, "link set dev br0 up"])
        if self.topology is not None:
            tbf = self.topology.link.port_tbf()
            self._batch("tc", switch, [f"qdisc replace dev {port} root {tbf}" for port in ports])

    @property
    def _mtu(self) -> int:
        return 1500 if self.topology is None else self.topology.mtu

    def _host_lines(self, host: int) -> list[str]:
        lines = [
            "link set dev lo up",
            f"link set dev {INTERFACE} mtu {self._mtu} address {_mac(host)}",
            f"address add {self.addresses[host]}/24 dev {INTERFACE}",
            f"link set dev {INTERFACE} up",
        ]
        if self.topology is not None:
            link = self.topology.up(host)
            # TCP must not send more at once than fits the bucket: tbf would split it into frames, which takes ten times
            # the processor time.
            gso_bytes = min(max(link.burst, 2 * link.frame_bytes), 65536)
            lines.append(f"link set dev {INTERFACE} gso_max_size {gso_bytes}")
        # Known neighbors need no lookup, so no first message of a run waits for an answer.
        lines += [
            f"neighbor replace {self.addresses[peer]} lladdr {_mac(peer)} nud permanent dev {INTERFACE}"
            for peer in range(self._count)
            if peer != host
        ]
        return lines

    def _batch(self, program: str, namespace: str, lines: Iterable[str]) -> None:
        self._run(program, "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")

    def _run(self, program: str, *arguments: str, text: str = "") -> None:
        # The mark lets the reaper find a command that was running when we were killed.
        environment = {**os.environ, reaper.MARK: self.id}
        line = [reaper.tool(program), *arguments]
        completed = subprocess.run(line, input=text, capture_output=True, text=True, check=False, env=environment)
        if completed.returncode:
            raise FabricError(f"`{' '.join(line)}` failed: {completed.stderr.strip()}\n{text}".rstrip())


def start_reaper(emulation: str, maker: int) -> subprocess.Popen[bytes]:
    """Start the reaper, which removes the emulation when its input closes, and wait until it is ready. It needs nothing
    but the standard library. Raise FabricError if it does not start."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, emulation, str(maker)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that the terminal's Ctrl-C does not reach it
    )
    assert process.stdout is not None
    with process.stdout as answer:
        if answer.readline() != b"ready\n":
            process.kill()
            process.communicate()
            raise FabricError("the process that removes the hosts afterwards did not start")
    return process


def _mac(host: int) -> str:
    return f"02:50:0a:40:00:{host + 1:02x}"  # the switch identifies hosts by the last byte


def clean(force: bool = False) -> list[str]:
    """Remove what is left of emulations whose maker is gone; with `force`, also of running ones.

    Returns the names of the namespaces and cgroups removed. Touches nothing but names of emulations.
    """
    removed: list[str] = []
    names = [*reaper.list_namespaces(), *(group.name for group in reaper.list_cgroups())]
    for emulation in sorted({"-".join(name.split("-")[:4]) for name in names}):
        if force or not reaper.maker_lives(emulation):
            removed += reaper.remove(emulation)
    return removed
