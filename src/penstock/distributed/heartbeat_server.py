"""Carries beats to rank 0's detector and its findings back: one line of JSON per message, over plain sockets.

It does not use torch's TCPStore: if the server is stopped, TCPStore calls block forever whatever their timeout, and if
it is gone, they print forty lines of C++ frames over the one line that matters.

    to the server    first, a line that is no JSON: token, space, rank
                     join: [machine, pid, started]     beat: RankStatus, and all: whether all ranks matter
                     asked: nanoseconds                failure: as below     noted: true, the answer to a failure
    to a rank        absent: [ranks that have not joined], with every answer until it is empty
                     sightings: [rank 0's status, or all ranks'], in answer to a beat
                     clock: [asked, nanoseconds here], in answer to asked     failure: [rank, action, error, kind]

Anyone who reaches the port can connect. The server parses nothing from a guest, a connection that has not sent the
token yet. An error on one connection ends only that one.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from typing import Any

from penstock._base.errors import RankFailedError
from penstock._base.process import Process
from penstock.distributed import host_clock
from penstock.distributed.failure import Failure, RankStatus, name_ranks, notify
from penstock.distributed.failure_detector import FailureDetector, Timeouts

_MAX_BYTES = 1 << 20
_GREETING_BYTES = 512
_GREETING_SECONDS = 10.0
_MAX_GUESTS = 64
_CONNECTIONS_PER_RANK = 4

Address = dict[str, Any]
"""Where the server is: hosts to try, port, token, and its process. Plain values, so that it can be broadcast."""


class Connection:
    """A socket that carries one JSON object per line. Any thread may send; one thread receives.

    Its errors tell an end from a network that is silent. `ConnectionError` is the other machine's answer that nobody is
    there any more. The kernel gives up a connection whose packets are not acknowledged, too: that is another OSError.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self._unread = b""
        self._sending = threading.Lock()
        self._error: OSError | None = None
        self.rank: int | None = None  # whose it is, for the server; None for a guest
        self.opened = time.monotonic()

    def send(self, message: dict[str, Any], greeting: str = "") -> None:
        """Send a message. Raise OSError if the other side is gone, or so slow to read that its buffers are full."""
        with self._sending, self._remember_error():
            self.link.sendall(f"{greeting}{json.dumps(message)}\n".encode())

    def receive(self) -> list[dict[str, Any]]:
        """Wait for bytes and return the messages that they complete. Raise as `receive_lines` and `parse` do."""
        return parse(self.receive_lines())

    def receive_lines(self, max_bytes: int = _MAX_BYTES) -> list[bytes]:
        """Wait for bytes and return the lines that they complete.

        Raises TimeoutError if nothing came in time, ConnectionError if the other side is gone, another OSError if it
        cannot be reached, and ValueError if it sent more than `max_bytes` without completing one.
        """
        with self._remember_error():
            data = self.link.recv(1 << 16)
        if not data:
            raise self._error or ConnectionResetError("the other side closed the connection")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > max_bytes and not lines:
            raise ValueError("a line without an end")
        return lines

    def close(self) -> None:
        self.link.close()

    @contextlib.contextmanager
    def _remember_error(self) -> Iterator[None]:
        """Keep the error that ended the connection: the kernel reports it once, and then only that it is closed."""
        try:
            yield
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            timed_out = isinstance(error, TimeoutError)  # to callers, that class means that nothing came in time
            self._error = self._error or (OSError(errno.EHOSTUNREACH, str(error)) if timed_out else error)
            raise self._error from None


def parse(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """Read messages, one per line. Raise ValueError if one is anything but a JSON object, RecursionError too."""
    messages = [json.loads(line) for line in lines]
    if not all(isinstance(message, dict) for message in messages):
        raise ValueError("a message that is not an object")
    return messages


class HeartbeatServer:
    """The thread of rank 0 that owns the detector. Ends itself once every rank has left or is gone."""

    def __init__(self, ranks: int, timeouts: Timeouts) -> None:
        local_only = _on_one_machine()
        self._ranks = ranks
        self._detector = FailureDetector(ranks, timeouts)
        self._timeouts = timeouts
        self._token = secrets.token_hex(16)
        self._listener = _listen(local_only)
        self._selector = selectors.DefaultSelector()
        self._open: list[Connection] = []
        self._connections: dict[int, Connection] = {}  # to each rank, the last that it joined on
        self._stopping = threading.Event()
        self._unaware: set[int] | None = None  # the ranks that have not acknowledged the failure sent to them
        self._acknowledged = threading.Event()
        self.address: Address = {
            "hosts": [*([] if local_only else _local_hosts()), "127.0.0.1"],
            "port": self._listener.getsockname()[1],
            "token": self._token,
            "process": astuple(Process.here()),
            "clock": host_clock.clock_name(),
        }
        self._thread = threading.Thread(target=self._serve, name="penstock-detector", daemon=True)
        self._thread.start()

    def await_leaving(self) -> None:
        """Wait until no rank needs this server, which ends with its process, and say so if that takes long."""
        start = last_warning = time.monotonic()
        while self._thread.is_alive():
            self._thread.join(min(1.0, self._timeouts.warn_seconds))
            now = time.monotonic()
            if now - last_warning >= self._timeouts.warn_seconds and (ranks := self._detector.remaining):
                last_warning = now
                notify(
                    f"rank 0 has reached the end of its program, and has waited {now - start:.0f} s for "
                    f"{name_ranks(ranks)} to close the pipeline"
                )

    def await_acknowledged(self, seconds: float) -> None:
        """Wait until all ranks know why the run failed: when this process ends, its last messages may be lost."""
        self._acknowledged.wait(seconds)

    def stop(self) -> None:
        """End the thread even though ranks may still need it."""
        self._stopping.set()

    def _serve(self) -> None:
        with self._listener, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            while self._detector.remaining and not self._stopping.is_set():
                for key, _ in self._selector.select(self._timeouts.beat_seconds / 2):
                    if key.data is None:
                        self._accept()
                    elif key.data in self._open:  # not dropped meanwhile
                        self._read(key.data)
                for guest in self._connections_from(None):
                    if time.monotonic() - guest.opened > _GREETING_SECONDS:
                        self._drop(guest)
                self._detector.judge()
                if self._unaware is None and (failure := self._detector.failure) is not None:
                    self._unaware = set(self._connections) - ({failure.rank} if failure.kind == "lost" else set())
                    self._broadcast(failure=failure)
            for connection in self._open:
                connection.close()

    def _accept(self) -> None:
        try:
            link, _ = self._listener.accept()
        except OSError:  # this process has no file descriptor left, for example; the selector reports it again at once
            time.sleep(self._timeouts.beat_seconds / 2)
            return
        link.settimeout(1.0)  # messages are small: only a stopped rank has no room for one
        self._open.append(Connection(link))
        self._selector.register(link, selectors.EVENT_READ, self._open[-1])
        for guest in self._connections_from(None)[:-_MAX_GUESTS]:
            self._drop(guest)

    def _connections_from(self, rank: int | None) -> list[Connection]:
        """Return the open connections of a rank, or the guests; oldest first."""
        return [connection for connection in self._open if connection.rank == rank]

    def _read(self, connection: Connection) -> None:
        try:
            lines = connection.receive_lines(_GREETING_BYTES if connection.rank is None else _MAX_BYTES)
            if lines and connection.rank is None:
                self._admit(connection, lines.pop(0))
            for message in parse(lines):
                self._handle(connection, message)
        except ConnectionError:
            self._drop(connection, peer_closed=True)
        except Exception:
            self._drop(connection)

    def _admit(self, connection: Connection, greeting: bytes) -> None:
        """Make a guest a rank's connection. A rank that returns may have left others open: the oldest are closed."""
        token, _, number = greeting.partition(b" ")
        if not (hmac.compare_digest(token, self._token.encode()) and number.isdigit() and int(number) < self._ranks):
            raise ValueError("not one of our ranks")
        connection.link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.rank = int(number)
        for earlier in self._connections_from(connection.rank)[:-_CONNECTIONS_PER_RANK]:
            self._drop(earlier)

    def _handle(self, connection: Connection, message: dict[str, Any]) -> None:
        rank, detector = connection.rank, self._detector
        assert rank is not None
        if "asked" in message:
            connection.send({"clock": [int(message["asked"]), host_clock.now_ns()]})
        if "join" in message:
            detector.join(rank, Process(*message["join"]))
            self._connections[rank] = connection
            if not detector.absent:
                self._broadcast(absent=[])
        if "failure" in message:
            detector.record_failure(Failure.from_list(message["failure"]))
        if "noted" in message:
            self._acknowledge(rank)
        if "beat" in message:
            detector.beat(rank, RankStatus.from_list(message["beat"]))
            answer: dict[str, Any] = {"sightings": detector.statuses[: None if message.get("all") else 1]}
            if detector.absent:
                answer["absent"] = detector.absent
            if detector.failure is not None:
                answer["failure"] = detector.failure
            connection.send(answer)

    def _acknowledge(self, rank: int) -> None:
        if self._unaware is not None:
            self._unaware.discard(rank)
            if not self._unaware:
                self._acknowledged.set()

    def _broadcast(self, **message: Any) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(message)

    def _drop(self, connection: Connection, *, peer_closed: bool = False) -> None:
        self._open.remove(connection)
        self._selector.unregister(connection.link)
        connection.close()
        rank = connection.rank
        if rank is not None and self._connections.get(rank) is connection:
            del self._connections[rank]
            if peer_closed:
                self._detector.record_disconnect(rank)
            self._acknowledge(rank)


def connect(address: Address, rank: int, seconds: float) -> Connection:
    """Join the detector at `address` as `rank`. Raise OSError if none of its hosts answers within `seconds`."""
    process = Process.here()
    hosts: list[str] = address["hosts"]
    if address["process"][0] == process.machine:
        hosts = ["127.0.0.1"]
    problem: OSError | None = None
    for host in hosts:
        try:
            link = socket.create_connection((host, address["port"]), timeout=seconds)
        except OSError as error:
            problem = error
            continue
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = Connection(link)
        with contextlib.suppress(ConnectionError):  # the receiver will notice it
            connection.send({"join": astuple(process)}, f"{address['token']} {rank}\n")
        return connection
    assert problem is not None
    raise problem


def first_connection(address: Address, rank: int, seconds: float) -> tuple[Connection, Address]:
    """`connect`; and where to return to without looking up names. Raise RankFailedError instead of OSError."""
    try:
        connection = connect(address, rank, seconds)
    except OSError as error:
        hosts = f"{' or '.join(address['hosts'])}, port {address['port']}"
        raise RankFailedError(
            f"rank {rank} cannot reach rank 0 at {hosts} ({error}), where ranks report failures to each other. "
            f"Allow TCP connections between the machines of this run, and set MASTER_ADDR to rank 0's host."
        ) from error
    return connection, {**address, "hosts": [str(connection.link.getpeername()[0])]}


def _on_one_machine() -> bool:
    """Whether the launcher's variables say that no rank runs elsewhere; torchrun sets both."""
    ranks, local_ranks = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    is_local_master = os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")
    return is_local_master or (ranks is not None and ranks == local_ranks)


def _local_hosts() -> list[str]:
    """Return the names by which other machines may know this one, most reliable first."""
    master = os.environ.get("MASTER_ADDR", "")
    # The pipeline may have no rank on the master's machine, and a pod's host name is known only inside the pod.
    return [host for host in (_address_towards(master), master, socket.gethostname()) if host]


def _address_towards(host: str) -> str | None:
    """Return the address from which this machine talks to another; None if only this machine can use it."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def _listen(local_only: bool) -> socket.socket:
    if local_only:
        return socket.create_server(("127.0.0.1", 0), backlog=512)
    dual_stack = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual_stack else socket.AF_INET
    return socket.create_server(("", 0), family=family, dualstack_ipv6=dual_stack, backlog=512)
