"""Carries beats to rank 0's detector and its findings back: one line of JSON per message, over plain sockets.

It does not use torch's TCPStore: if the server is stopped, TCPStore calls block forever whatever their timeout, and if
it is gone, they print forty lines of C++ frames over the one line that matters.

    to the server    join: [machine, pid, started]     beat: sighting     failure: text     noted: true
                     asked: nanoseconds (each with rank and token; noted is the answer to a failure)
    to a rank        absent: [ranks that have not joined], every beat until it is ready: true
                     sightings: [...], in answer to a beat     failure: text
                     clock: [asked, nanoseconds here], in answer to asked
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
from collections.abc import Iterator
from typing import Any

from penstock.errors import PipelineFailure
from penstock.runtime.processes import host_clock
from penstock.runtime.processes.failure import Failure, Sighting
from penstock.runtime.processes.failure_detector import GONE, FailureDetector, Patience, Process, silence
from penstock.runtime.processes.joining import Missing

_MOST_BYTES = 1 << 20

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
        self._broken: OSError | None = None

    @property
    def host(self) -> str:
        """The other side's address in numbers."""
        return str(self.link.getpeername()[0])

    def send(self, message: dict[str, Any]) -> None:
        """Sends a message. Raises OSError if the other side is gone, or so slow to read that its buffers are full."""
        with self._sending, self._noting():
            self.link.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]]:
        """Waits for bytes and returns the messages that they complete.

        Raises TimeoutError if nothing came in time, ConnectionError if the other side is gone, another OSError if it
        cannot be reached, and ValueError if it sent anything else.
        """
        with self._noting():
            data = self.link.recv(1 << 16)
        if not data:
            raise self._broken or ConnectionResetError("the other side closed the connection")
        *lines, self._unread = (self._unread + data).split(b"\n")
        if len(self._unread) > _MOST_BYTES:
            raise ValueError("a message without an end")
        messages = [json.loads(line) for line in lines]
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a message that is not an object")
        return messages

    def close(self) -> None:
        self.link.close()

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """Keeps the error that ended the connection: the kernel tells it once, and then only that it is closed."""
        try:
            yield
        except OSError as error:
            if isinstance(error, TimeoutError) and error.errno is None:
                raise
            given_up = isinstance(error, TimeoutError)  # to callers, that class means that nothing came in time
            self._broken = self._broken or (OSError(errno.EHOSTUNREACH, str(error)) if given_up else error)
            raise self._broken from None


class HeartbeatServer:
    """The thread of rank 0 that owns the detector. Ends itself once every rank has left or is gone."""

    def __init__(self, ranks: int, patience: Patience) -> None:
        alone = _on_one_machine()
        self._detector = FailureDetector(ranks, patience)
        self._beat_seconds = patience.beat_seconds
        self._token = secrets.token_hex(16)
        self._listener = _listen(alone)
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, Connection] = {}
        self._stopping = threading.Event()
        self._unaware: set[int] = set()
        self._noted = threading.Event()
        self._told = 0.0
        process = Process.here()
        self.address: Address = {
            "hosts": [*([] if alone else _own_hosts()), "127.0.0.1"],
            "port": self._listener.getsockname()[1],
            "token": self._token,
            "process": [process.machine, process.pid, process.started],
            "clock": host_clock.clock_name(),
        }
        self._thread = threading.Thread(target=self._serve, name="penstock-detector", daemon=True)
        self._thread.start()

    def join(self, seconds: float) -> bool:
        """Waits until no rank needs this server. Returns whether that happened in time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    @property
    def remaining(self) -> list[int]:
        """The ranks that may still need this server. Any thread may ask."""
        return self._detector.remaining

    def await_noted(self, seconds: float) -> None:
        """Waits until all ranks know why the run failed: when this process ends, its last messages may be lost."""
        self._noted.wait(seconds)

    def stop(self) -> None:
        """Ends the thread even though ranks may still need it."""
        self._stopping.set()

    def _serve(self) -> None:
        with self._listener, self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ, None)
            while not (self._detector.deserted or self._stopping.is_set()):
                for key, _ in self._selector.select(self._beat_seconds / 2):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                known = self._detector.failure
                self._detector.judge()
                if known is None and self._detector.failure is not None:
                    self._announce(self._detector.failure)
                self._tell_absent()
            for key in list(self._selector.get_map().values()):
                if key.data is not None:
                    key.data.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            link, _ = self._listener.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(1.0)  # messages are small: only a stopped rank has no room for one
            self._selector.register(link, selectors.EVENT_READ, Connection(link))

    def _read(self, connection: Connection) -> None:
        try:
            for message in connection.receive():
                self._take(connection, message)
        except ConnectionError:
            self._drop(connection, gone=True)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            self._drop(connection, gone=False)

    def _take(self, connection: Connection, message: dict[str, Any]) -> None:
        if not hmac.compare_digest(str(message["token"]), self._token):
            raise ValueError("not one of our ranks")
        rank, detector = int(message["rank"]), self._detector
        if "asked" in message:
            connection.send({"clock": [int(message["asked"]), host_clock.now_ns()]})
        if "join" in message:
            detector.join(rank, Process(*message["join"]))
            self._connections[rank] = connection
            if not detector.absent:
                self._tell(ready=True)
        if "failure" in message:
            failure = Failure.from_json(message["failure"])
            if detector.accuse(failure):
                self._announce(failure)
        if "noted" in message:
            self._note(rank)
        if "beat" in message:
            detector.beat(rank, Sighting.from_list(message["beat"]))
            answer: dict[str, Any] = {"sightings": [sighting.to_list() for sighting in detector.sightings]}
            if detector.failure is not None:
                answer["failure"] = detector.failure.to_json()
            connection.send(answer)

    def _tell_absent(self) -> None:
        now = time.monotonic()
        if now - self._told >= self._beat_seconds and (absent := self._detector.absent):
            self._told = now
            self._tell(absent=absent)

    def _announce(self, failure: Failure) -> None:
        lost = {failure.rank} if failure.kind == "lost" else set()
        self._unaware = set(self._connections) - lost
        self._tell(failure=failure.to_json())

    def _note(self, rank: int) -> None:
        self._unaware.discard(rank)
        if self._detector.failure is not None and not self._unaware:
            self._noted.set()

    def _tell(self, **message: Any) -> None:
        for connection in self._connections.values():
            with contextlib.suppress(OSError):
                connection.send(message)

    def _drop(self, connection: Connection, *, gone: bool) -> None:
        self._selector.unregister(connection.link)
        connection.close()
        for rank, known in list(self._connections.items()):
            if known is connection:
                del self._connections[rank]
                if gone:
                    self._detector.hang_up(rank)
                self._note(rank)


def connect(address: Address, rank: int, seconds: float) -> Connection:
    """Joins the detector at `address` as `rank`. Raises OSError if none of its hosts answers within `seconds`."""
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
        me = [process.machine, process.pid, process.started]
        connection.send({"rank": rank, "token": address["token"], "join": me})
        return connection
    assert problem is not None
    raise problem


def join(address: Address, rank: int, patience: Patience, missing: Missing) -> Connection:
    """Connects and waits until every rank has.

    Raises PipelineFailure if rank 0 cannot be reached, if a rank ends meanwhile, or if it takes more than
    `join_seconds`.
    """
    where = f"{' or '.join(address['hosts'])}, port {address['port']}"
    try:
        connection = connect(address, rank, patience.stall_seconds)
    except OSError as error:
        raise PipelineFailure(
            f"rank {rank} cannot reach rank 0 at {where} ({error}), where ranks report failures to each other. "
            f"Allow TCP connections between the machines of this run, and set MASTER_ADDR to rank 0's host."
        ) from error
    try:
        _await_ready(connection, Process(*address["process"]), rank, patience, missing)
    except BaseException:
        connection.close()
        raise
    return connection


def _await_ready(connection: Connection, server: Process, rank: int, patience: Patience, missing: Missing) -> None:
    heard = time.monotonic()
    connection.link.settimeout(patience.beat_seconds)
    while True:
        missing.check()
        messages: list[dict[str, Any]] = []
        lost: str | None = None
        try:
            messages, heard = connection.receive(), time.monotonic()
        except TimeoutError:
            seconds = time.monotonic() - heard
            lost = silence(seconds, server.state(), patience) if seconds >= patience.stall_seconds else None
        except ConnectionError:
            lost = GONE
        except OSError as error:
            lost = f"out of reach ({error})"
        failure = None if lost is None else Failure(0, None, lost, "lost")
        for message in messages:
            if "ready" in message:
                return
            if "failure" in message:
                failure = Failure.from_json(message["failure"])
            missing.ranks = tuple(message.get("absent", missing.ranks))
        if failure is not None:
            raise PipelineFailure(f"rank {rank} stops: {failure}")


def _on_one_machine() -> bool:
    """Whether the launcher's variables say that no rank runs elsewhere; torchrun sets both."""
    ranks, here = os.environ.get("WORLD_SIZE"), os.environ.get("LOCAL_WORLD_SIZE")
    if ranks is not None and ranks == here:
        return True
    return os.environ.get("MASTER_ADDR", "localhost") in ("localhost", "127.0.0.1", "::1")


def _own_hosts() -> list[str]:
    """The names by which other machines may know this one, most reliable first."""
    master = os.environ.get("MASTER_ADDR", "")
    # The pipeline may have no rank on the master's machine, and a pod's host name is known only inside the pod.
    return [host for host in (_address_towards(master), master, socket.gethostname()) if host]


def _address_towards(host: str) -> str | None:
    """The address from which this machine talks to another; None if only this machine can use it."""
    try:
        family, kind, _, _, there = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(there)  # sends nothing
            address: str = probe.getsockname()[0]
    except OSError:
        return None
    return None if ipaddress.ip_address(address).is_loopback else address


def _listen(alone: bool) -> socket.socket:
    if alone:
        return socket.create_server(("127.0.0.1", 0), backlog=512)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", 0), backlog=512)
