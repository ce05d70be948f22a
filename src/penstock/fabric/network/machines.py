"""Makes hosts out of one machine: a network namespace each, joined by shaped links to a switch in one of its own.

The machine's own namespace gets no device, address or route. What was measured of the links stands in link.py.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.errors import ArgumentError, FabricError
from penstock.fabric.network import keeper
from penstock.fabric.network.checks import why_not
from penstock.fabric.network.holdback import Means, check_slow, hold_back
from penstock.fabric.network.inside import within
from penstock.fabric.network.link import Link

INTERFACE = "eth0"
"""The one that a host has beside lo."""
MOST = 200
"""Hosts of one emulation: a subnet has addresses for 254."""

_SUBNETS = ipaddress.IPv4Network("10.64.0.0/10")


class Machines:
    """Hosts that stand from `with` to its end, and no longer than the process that made them, however that ends.

        with Machines(4, parse_link("100mbit")) as machines:
            subprocess.run(machines.command(0, ["python", "-c", "..."]))

    Attributes:
        id: of this emulation; its namespaces are called `{id}-h0`, ... and `{id}-switch`.
        hosts: the names of the hosts' namespaces.
        addresses: IPv4, by host.
        network: the subnet that they are from.
    """

    def __init__(
        self,
        hosts: int,
        link: Link | None = None,
        *,
        congestion_control: str | None = None,
        slow: Mapping[int, float] | None = None,
    ) -> None:
        """
        Args:
            hosts: how many.
            link: of each host to the switch, shaped at both ends; None: as fast as the machine can.
            congestion_control: of TCP between the hosts; None: as the kernel has it.
            slow: hosts whose processes get no more than this share of one core's time, all together (holdback.py).

        Raises:
            ArgumentError: too few or too many hosts, a congestion control that the kernel has not, a slow host that is
                not there or a share that is none.
        """
        if not 1 <= hosts <= MOST:
            raise ArgumentError(f"{hosts} hosts are asked for: give 1 to {MOST}")
        if congestion_control is not None:
            _check_congestion_control(congestion_control)
        self.link = link
        self.congestion_control = congestion_control
        self.slow = check_slow(slow or {}, hosts)
        self.id = ""
        self.hosts: tuple[str, ...] = ()
        self.addresses: tuple[str, ...] = ()
        self.network = _SUBNETS
        self._count = hosts
        self._maker = 0
        self._keeper: subprocess.Popen[bytes] | None = None
        self._means: Means | None = None

    @property
    def held_back_by(self) -> str | None:
        """What holds the slow hosts back; None where none is slow, and before they are made."""
        return None if self._means is None else self._means.name

    def __enter__(self) -> Self:
        """Makes the hosts.

        Raises:
            FabricError: this machine cannot (`why_not` says why), or a command failed. Nothing is left then.
        """
        missing = why_not()
        if missing is not None:
            raise FabricError(missing)
        self._maker = os.getpid()
        number, claim = _claim_subnet()
        with claim:
            self.id = f"penstock-{self._maker}-{keeper.started(self._maker)}-{number}"
            self.hosts = tuple(f"{self.id}-h{host}" for host in range(self._count))
            self.network = _subnet(number)
            self.addresses = tuple(str(self.network[host + 1]) for host in range(self._count))
            self._keeper = _start_keeper(self.id, claim)
        try:
            # Before the hosts, so that nothing of them is made where they cannot be held back.
            self._means = hold_back(self.id, self.slow) if self.slow else None
            self._make()
            if self._means is not None:
                self._means.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kills what still runs in the hosts, and takes them down. May be called again.

        Raises:
            FabricError: something is left, or a slow host has not been held back all the time.
        """
        if self._keeper is None or os.getpid() != self._maker:  # nothing of a process that was forked from the maker
            return
        process = self._keeper
        assert process.stdin is not None
        failed = None if self._means is None else self._means.failed()
        process.stdin.close()
        status = process.wait()
        self._keeper = None
        if status:  # it was killed itself, or could not
            keeper.remove(self.id)
        if self._means is not None:
            self._means.close()
        left = keeper.names_of(self.id)
        if left:
            raise FabricError(f"{', '.join(left)} cannot be removed: try `ip netns delete {left[0]}`")
        groups = [str(group) for group in keeper.groups_of(self.id)]
        if groups:
            raise FabricError(f"{', '.join(groups)} cannot be removed: try `rmdir {groups[0]}`")
        if failed is not None:
            raise FabricError(failed)

    def command(self, host: int, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """What to start for `argv` to run on a host, with `environment` beside what `variables` gives."""
        added = [f"{name}={value}" for name, value in {**self.variables(), **(environment or {})}.items()]
        entering = [_tool("ip"), "netns", "exec", self.hosts[host], "env", *added]
        if host in self.slow and self._means is not None:
            return self._means.command(host, entering, argv)
        return [*entering, *argv]

    def variables(self) -> dict[str, str]:
        """The environment of a process on a host: gloo and its kind are told which interface to use."""
        names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return {keeper.MARK: self.id, **dict.fromkeys(names, INTERFACE)}

    def qdiscs(self) -> str:
        """How the switch's ports are shaped and what passed them, as tc tells it."""
        done = subprocess.run(
            [_tool("tc"), "-s", "-n", f"{self.id}-switch", "qdisc", "show"], capture_output=True, text=True, check=False
        )
        return done.stdout

    def _make(self) -> None:
        switch = f"{self.id}-switch"
        mtu = 1500 if self.link is None else self.link.mtu
        for name in (switch, *self.hosts):
            self._run("ip", "netns", "add", name)
            within(keeper.FOLDER / name, _without_ipv6)
        ports = [f"p{host}" for host in range(self._count)]
        # No spanning tree and no snooping: they would hold back or add frames. Addresses of devices stay known.
        lines = ["link add name br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0 ageing_time 100000000"]
        for host, port in enumerate(ports):
            end = f"name {INTERFACE} mtu {mtu} address {self._mac(host)} netns {self.hosts[host]}"
            lines += [f"link add name {port} mtu {mtu} type veth peer {end}", f"link set dev {port} master br0 up"]
        self._batch("ip", switch, [*lines, "link set dev br0 up"])
        for host in range(self._count):
            self._batch("ip", self.hosts[host], self._host_lines(host))
        if self.link is not None:
            self._batch("tc", switch, [f"qdisc replace dev {port} root {self.link.port_tbf()}" for port in ports])
            for name in self.hosts:
                self._batch("tc", name, [f"qdisc replace dev {INTERFACE} root {self.link.tbf()}"])

    def _host_lines(self, host: int) -> list[str]:
        lines = [
            "link set dev lo up",
            f"address add {self.addresses[host]}/{self.network.prefixlen} dev {INTERFACE}",
            f"link set dev {INTERFACE} up",
        ]
        if self.link is not None:
            # What TCP sends at once fits the bucket: tbf takes apart what does not, frame by frame, which costs ten
            # times the processor time.
            lines.append(f"link set dev {INTERFACE} gso_max_size {max(self.link.burst, 2 * self.link.frame_bytes)}")
        # Neighbours that are known need not be asked for, so no first message of a run waits for an answer.
        others = [other for other in range(self._count) if other != host]
        lines += [
            f"neighbour replace {self.addresses[other]} lladdr {self._mac(other)} nud permanent dev {INTERFACE}"
            for other in others
        ]
        if self.congestion_control is not None:
            # A route may name one that the administrator has not opened to all users; a namespace's default may not.
            source = f"src {self.addresses[host]} congctl {self.congestion_control}"
            lines.append(f"route replace {self.network} dev {INTERFACE} proto kernel scope link {source}")
        return lines

    def _mac(self, host: int) -> str:
        return "02:50:" + ":".join(f"{part:02x}" for part in self.network[host + 1].packed)

    def _batch(self, program: str, namespace: str, lines: Iterable[str]) -> None:
        self._run(program, "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")

    def _run(self, program: str, *arguments: str, text: str = "") -> None:
        # The mark lets the keeper find a command that we had started when we were killed.
        environment = {**os.environ, keeper.MARK: self.id}
        line = [_tool(program), *arguments]
        done = subprocess.run(line, input=text, capture_output=True, text=True, check=False, env=environment)
        if done.returncode:
            raise FabricError(f"`{' '.join(line)}` failed: {done.stderr.strip()}\n{text}".rstrip())


def clean(force: bool = False) -> list[str]:
    """Removes what emulations have left whose maker is gone; with `force`, also those that run.

    Returns the names of the namespaces and cgroups removed. Nothing but names of emulations is touched.
    """
    removed: list[str] = []
    found = [*keeper.names_of(), *(group.name for group in keeper.groups_of())]
    for emulation in sorted({keeper.emulation_of(name) for name in found}):
        if force or not keeper.maker_lives(emulation):
            removed += keeper.remove(emulation)
    return removed


def _without_ipv6() -> None:
    """In the namespace of the calling thread, before a device is up: no frames but the job's."""
    for where in ("all", "default"):
        setting = Path(f"/proc/sys/net/ipv6/conf/{where}/disable_ipv6")
        if setting.exists():
            setting.write_text("1")


def _check_congestion_control(name: str) -> None:
    try:
        known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control").read_text().split()
    except OSError:
        return
    if name not in known:
        raise ArgumentError(f"the kernel has no congestion control {name!r}: give one of {', '.join(known)}")


def _tool(name: str) -> str:
    return keeper.tool(name) or name


def _subnet(number: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((int(_SUBNETS.network_address) + 256 * number, 24))


def _claim_subnet() -> tuple[int, socket.socket]:
    """A subnet that neither this machine nor another emulation uses, and what holds it until it is closed.

    The claim is an abstract socket's name: the kernel gives it to one only, and frees it when that one ends.
    """
    used = _routes()
    for number in range(_SUBNETS.num_addresses // 256):
        network = _subnet(number)
        if any(network.overlaps(other) for other in used):
            continue
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0penstock-fabric-{network.network_address}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return number, claim
    raise FabricError(f"every subnet of {_SUBNETS} is in use: end an emulation, or run `penstock fabric clean`")


def _routes() -> list[ipaddress.IPv4Network]:
    """What this machine reaches by a route of its own."""
    line = [_tool("ip"), "-4", "-json", "route", "show", "table", "all"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    given = [str(route.get("dst", "default")) for route in json.loads(done.stdout or "[]")]
    return [ipaddress.IPv4Network(target, strict=False) for target in given if target[0].isdigit()]


def _start_keeper(emulation: str, claim: socket.socket) -> subprocess.Popen[bytes]:
    """Starts what removes the emulation when its standard input closes, and holds the claim until then."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(keeper.__file__), emulation, str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=(claim.fileno(),),
        start_new_session=True,  # a Ctrl-C of the terminal is not for it
    )
    assert process.stdout is not None
    with process.stdout as answer:
        if answer.readline() != b"ready\n":
            process.kill()
            process.communicate()
            raise FabricError("the process that is to take the hosts down again did not start")
    return process
