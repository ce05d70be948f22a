"""Makes hosts out of one machine: a network namespace each, joined by shaped links to a switch in one of its own."""

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
from typing import Any, Self

from penstock.errors import ArgumentError, FabricError
from penstock.fabric.network import keeper
from penstock.fabric.network.checks import why_not
from penstock.fabric.network.inside import within
from penstock.fabric.network.link import Link
from penstock.fabric.network.offloads import set_offloads

INTERFACE = "eth0"
"""Of every host: the one that it has beside lo."""
MOST = 200
"""Hosts of one emulation: a subnet has addresses for 254."""

_SUBNETS = ipaddress.ip_network("10.64.0.0/10")
_SEGMENTS = {"tcp-segmentation-offload": False, "generic-segmentation-offload": False, "generic-receive-offload": False}


class Machines:
    """Hosts that stand from `with` to its end, and never longer than the process that made them.

        with Machines(4, parse_link("100mbit")) as machines:
            subprocess.run(machines.command(0, ["python", "-c", "..."]))

    Attributes:
        id: of this emulation; its namespaces are called `{id}-h0`, ... and `{id}-switch`.
        hosts: the names of the hosts' namespaces.
        addresses: IPv4, by host.
        interface: the name of each host's interface.
    """

    def __init__(self, hosts: int, link: Link | None = None, *, congestion_control: str | None = None) -> None:
        """
        Args:
            hosts: how many.
            link: of each host to the switch, shaped at both ends; None: as fast as the machine can.
            congestion_control: of TCP in the hosts; None: as the kernel has it.

        Raises:
            ArgumentError: too few or too many hosts.
        """
        if not 1 <= hosts <= MOST:
            raise ArgumentError(f"{hosts} hosts are asked for: give 1 to {MOST}")
        self.link = link
        self.congestion_control = congestion_control
        self.interface = INTERFACE
        self._count = hosts
        self._keeper: subprocess.Popen[bytes] | None = None
        self.id = ""
        self.hosts: tuple[str, ...] = ()
        self.addresses: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        """Makes the hosts.

        Raises:
            FabricError: this machine cannot (`why_not`), or a command failed. Nothing is left then.
        """
        missing = why_not()
        if missing is not None:
            raise FabricError(missing)
        subnet, claim = _claim_subnet()
        with claim:
            self.id = f"penstock-{os.getpid()}-{keeper.started(os.getpid())}-{subnet}"
            self.hosts = tuple(f"{self.id}-h{host}" for host in range(self._count))
            network = _network(subnet)
            self.addresses = tuple(str(network[host + 1]) for host in range(self._count))
            self._keeper = _start_keeper(self.id, claim)
        try:
            self._make()
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
            FabricError: something is left.
        """
        if self._keeper is None:
            return
        process = self._keeper
        assert process.stdin is not None
        process.stdin.close()
        status = process.wait()
        self._keeper = None
        if status:  # it was killed itself, or has failed
            keeper.remove(self.id)
        left = keeper.names_of(self.id)
        if left:
            raise FabricError(f"{', '.join(left)} cannot be removed: try `ip netns delete {left[0]}`")

    def command(self, host: int, argv: Sequence[str], environment: Mapping[str, str] | None = None) -> list[str]:
        """What to start for `argv` to run on a host, with `environment` beside what `variables` gives."""
        added = [f"{name}={value}" for name, value in {**self.variables(), **(environment or {})}.items()]
        return [_tool("ip"), "netns", "exec", self.hosts[host], "env", *added, *argv]

    def variables(self) -> dict[str, str]:
        """The environment of a process on a host: gloo and its kind are told which interface to use."""
        names = ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        return {keeper.MARK: self.id, **dict.fromkeys(names, self.interface)}

    def _make(self) -> None:
        switch = f"{self.id}-switch"
        mtu = self.link.mtu if self.link is not None else 1500
        for name in (switch, *self.hosts):
            self._run("ip", "netns", "add", name)
            within(keeper.FOLDER / name, self._set_kernel)
        macs = [f"02:50:{int(self.id.rsplit('-')[-1]) >> 8:02x}:{int(self.id.rsplit('-')[-1]) & 255:02x}:00:{host + 1:02x}" for host in range(self._count)]
        self._batch("ip", switch, ["link add name br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0"])
        self._batch(
            "ip",
            switch,
            [
                f"link add name p{host} mtu {mtu} type veth peer name {INTERFACE} mtu {mtu} address {mac} netns {name}"
                for host, (name, mac) in enumerate(zip(self.hosts, macs, strict=True))
            ],
        )
        self._batch("ip", switch, [f"link set dev p{host} master br0 up" for host in range(self._count)] + ["link set dev br0 up"])
        for host, name in enumerate(self.hosts):
            self._batch("ip", name, ["link set dev lo up", f"address add {self.addresses[host]}/24 dev {INTERFACE}", f"link set dev {INTERFACE} up"]
            )
        self._shape(switch, [f"p{host}" for host in range(self._count)])
        for name in self.hosts:
            self._shape(name, [INTERFACE])

    def _shape(self, name, devices):
        off = os.environ.get("PT_OFF", "")
        if off:
            within(keeper.FOLDER / name, lambda: [set_offloads(d, _SEGMENTS) for d in devices])
        if self.link is not None:
            self._batch("tc", name, [f"qdisc replace dev {d} root {self.link.tbf()}" for d in devices])

    def _set_kernel(self) -> None:
        """In the namespace of the calling thread, before it has a device that is up."""
        for where in ("all", "default"):
            setting = Path(f"/proc/sys/net/ipv6/conf/{where}/disable_ipv6")
            if setting.exists():
                setting.write_text("1")
        if self.congestion_control is not None:
            Path("/proc/sys/net/ipv4/tcp_congestion_control").write_text(self.congestion_control)

    def _batch(self, program: str, namespace: str, lines: Iterable[str]) -> None:
        self._run(program, "-n", namespace, "-batch", "-", text="\n".join(lines) + "\n")

    def _run(self, program: str, *arguments: str, text: str | None = None) -> None:
        done = subprocess.run([_tool(program), *arguments], input=text, capture_output=True, text=True, check=False, env={**os.environ, keeper.MARK: self.id})
        if done.returncode:
            raise FabricError(f"`{program} {' '.join(arguments)}` failed: {done.stderr.strip()}\n{text or ''}")


def _tool(name: str) -> str:
    return keeper.tool(name) or name


def _network(subnet: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network((int(_SUBNETS.network_address) + 256 * subnet, 24))


def _claim_subnet() -> tuple[int, socket.socket]:
    """A subnet that neither this machine nor another emulation uses, and what holds it until it is closed.

    The claim is an abstract socket's name: the kernel gives it to one process only, and frees it when that one ends.
    """
    done = subprocess.run([_tool("ip"), "-4", "-json", "route", "show", "table", "all"], capture_output=True, text=True, check=False)
    routes = json.loads(done.stdout or "[]") if done.returncode == 0 else []
    used = [ipaddress.ip_network(route["dst"], strict=False) for route in routes if route.get("dst", "default")[0].isdigit()]
    for subnet in range(_SUBNETS.num_addresses // 256):
        network = _network(subnet)
        if any(network.overlaps(other) for other in used if isinstance(other, ipaddress.IPv4Network)):
            continue
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            claim.bind(f"\0penstock-fabric-{network.network_address}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            continue
        return subnet, claim
    raise FabricError(f"every subnet of {_SUBNETS} is in use: end an emulation, or run `penstock fabric clean`")


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
            process.wait()
            raise FabricError("the process that would take the hosts down again did not start")
    return process


def clean(force: bool = False) -> list[str]:
    """Removes what emulations left whose maker has ended; with `force`, running ones too. Returns the names removed."""
    emulations = sorted({keeper.emulation_of(name) for name in keeper.names_of()})
    removed: list[str] = []
    for emulation in emulations:
        if force or not keeper.maker_lives(emulation):
            removed += keeper.remove(emulation)
    return removed
