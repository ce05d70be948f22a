"""How ranks meet. Whoever connects to the failure detector, and whatever it is sent: it goes on, and serves its ranks.
A rank that waits for others at the start says for whom and where, and what is wrong with how they were started."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Any

import pytest
import torch.distributed as dist

from penstock._base import process
from penstock._base.errors import ArgumentError, RankFailedError
from penstock.distributed import heartbeat_server, host_clock, joining
from penstock.distributed.failure import Failure, Position, RankStatus, wait_chain
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.heartbeat_server import Connection, HeartbeatServer, connect
from penstock.distributed.host_clock import INITIAL_EXCHANGES, MAX_EXCHANGES, HostOffset
from penstock.distributed.joining import Meeting, MissingRanks
from penstock.distributed.watchdog import Watchdog

DEEP = b"[" * 500_000
PATIENCE = Timeouts(beat_seconds=0.1)


class Served:
    """A detector of two ranks, of which rank 1 has joined."""

    def __init__(self) -> None:
        self.server = HeartbeatServer(2, PATIENCE)
        self.token: str = self.server.address["token"]
        self.rank = self.join(1)
        assert self.serves()

    def join(self, rank: int) -> Connection:
        connection = connect(self.server.address, rank, 10)
        connection.link.settimeout(10)
        return connection

    def stranger(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.server.address["port"]), timeout=10)

    def drops(self, sent: bytes) -> bool:
        """Whether a stranger's connection is closed, without an answer, because of what it sends."""
        with self.stranger() as link:
            try:
                link.sendall(sent)
                return link.recv(1) == b""
            except ConnectionError:
                return True

    def serves(self, rank: Connection | None = None, *, well: bool = True) -> bool:
        """Whether a rank is still answered; `well`: and nobody is said to be lost."""
        connection = rank or self.rank
        connection.send({"beat": RankStatus(Position("1RECV_F0", (0,)))})
        while True:
            for message in connection.receive():
                assert not (well and "failure" in message)
                if "sightings" in message:
                    return len(message["sightings"]) == 1  # of 2 ranks: none asked for all


@pytest.fixture
def served() -> Iterator[Served]:
    one = Served()
    yield one
    one.server.stop()
    assert has_ended(one.server)
    one.rank.close()


def has_ended(server: HeartbeatServer) -> bool:
    server._thread.join(10)
    return not server._thread.is_alive()


BEFORE_THE_TOKEN = (
    b"x" * 513,
    b'{"rank": 0, "token": "guess", "beat": 1}\n',
    b"0" * 32 + b" 0\n",
    b"\xff\xfe\x00\xd8 0\n",
)
RANKS_THERE_ARE_NOT = ("", "-1", "2", "9" * 400, "\N{SUPERSCRIPT TWO}")
FROM_A_RANK: list[bytes | dict[str, Any]] = [
    DEEP,
    b'"' + b"x" * (1 << 20) + b"y" * (1 << 17),
    b'{"beat": [',
    {"asked": float("inf")},
    {"beat": [["", [7]], 0, False, None]},  # peers
    {"beat": [""]},
    {"join": ["m", "../../../proc/self", "1"]},
    {"failure": Failure(7, None, "x")},
    {"failure": [0, None, "x", ["raised"]]},
]


def test_nothing_of_a_connection_without_the_token_and_a_rank_is_parsed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat_server, "parse", lambda lines: parsed.extend(lines) or [])
        for sent in BEFORE_THE_TOKEN:
            assert served.drops(sent), sent
        for number in RANKS_THERE_ARE_NOT:
            assert served.drops(f"{served.token} {number}\n{{}}\n".encode()), number
        assert parsed == []
    assert served.serves()


def test_what_a_rank_should_not_send_ends_its_connection_only(served: Served) -> None:
    for sent in FROM_A_RANK:
        line = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        assert served.drops(f"{served.token} 0\n".encode() + line + b"\n"), line[:99]
        assert served.serves()


def test_hundreds_of_guests_and_a_rank_that_returns_keep_no_rank_out(served: Served) -> None:
    with ExitStack() as guests:
        for _ in range(300):
            guests.enter_context(served.stranger())
        returned = [served.join(0) for _ in range(12)]
        for connection in returned:
            guests.callback(connection.close)
        assert served.serves(returned[-1])
        assert served.serves()
        assert len(served.server._connections_from(None)) <= 64
        assert len(served.server._connections_from(0)) == 4


def test_a_rank_whose_first_connection_breaks_connects_again(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Strangers may take its place, or a middlebox cut it."""
    whole, broken = served.server._handle, []

    def once(connection: Connection, *sent: Any) -> None:
        if broken or connection.rank != 0:
            whole(connection, *sent)
        else:
            broken.append(connection)
            connection.link.shutdown(socket.SHUT_RDWR)

    monkeypatch.setattr(served.server, "_handle", once)
    watchdog = Watchdog.join(served.server.address, 0, 2, PATIENCE, MissingRanks(0, 2, PATIENCE))
    assert broken
    assert watchdog.failure is None
    assert served.serves()
    watchdog.close()


def test_a_failure_before_the_last_rank_comes_is_raised_where_the_others_wait() -> None:
    patience = Timeouts(beat_seconds=2.0)
    server = HeartbeatServer(3, patience)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(Watchdog.join, server.address, 0, 3, patience, MissingRanks(0, 3, patience))
        while 0 in server._detector.absent:
            time.sleep(0.01)
        fallen = connect(server.address, 1, 10)
        fallen.send({"failure": Failure(1, None, "so")})
        while server._detector.failure is None:
            time.sleep(0.01)
        last = connect(server.address, 2, 10)
        with pytest.raises(RankFailedError, match="rank 1 failed outside of a step: so"):
            waiting.result(20)
    fallen.close()
    last.close()
    server.stop()
    assert has_ended(server)


ORDERS = "\x1b[2Jdone\r\x07\x9b1m"


def test_what_a_rank_says_is_one_line_without_orders_for_the_terminal() -> None:
    said = str(Failure.from_list([1, ORDERS, f"a\nb{ORDERS}", "raised"]))
    said += wait_chain(0, [RankStatus.from_list([[ORDERS, [1]], 1.0, False, None]), RankStatus()])[1]
    said += str(RankStatus.from_list([["", []], 1.0, False, [[ORDERS, []], ORDERS]]).device)
    said += Failure.of(0, "0F0", ValueError(ORDERS)).error
    assert said.isprintable()
    assert "done" in said
    assert len(Failure.from_list([1, None, "x" * 99_999, "raised"]).error) < 5000


FROM_RANK_0 = [DEEP, b'{"clock": [1]}', b'{"sightings": [3]}', b'{"failure": null}']


def pair() -> tuple[Connection, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=10)
        return Connection(ours), listener.accept()[0]


@pytest.mark.parametrize(("sent", "joining"), [*zip(FROM_RANK_0, [False, True] * 2, strict=True)], ids=range(4))
def test_whatever_answers_in_place_of_rank_0_the_watchdog_lives(
    sent: bytes, joining: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says once what it received; a rank that has yet to join cannot."""
    address = {"hosts": ["127.0.0.1"], "port": 1, "token": "t", "process": ["elsewhere", 1, ""]}
    dog = Watchdog(1, 2, Timeouts(beat_seconds=0.05), address)
    if joining:
        dog._all_here.clear()
    for _ in range(2):
        dog._connection, theirs = pair()
        dog._awaiting_answer = False
        with theirs:
            sending = threading.Thread(target=send, args=(theirs, sent + b"\n"))
            sending.start()
            while dog._connection is not None:
                dog._talk()
            sending.join()
    dog._tick()
    if joining:
        with pytest.raises(RankFailedError, match=r"rank 0 was lost.*: it sent what no rank sends \(\w+Error\)"):
            dog.check()
    else:
        dog.position = Position("1RECV_F0", (0,))
        dog._decide()
        assert dog.failure is None
    said = capsys.readouterr().err
    assert said.count("rank 1 received an invalid message from rank 0; reconnecting: ") == (not joining)


def send(link: socket.socket, sent: bytes) -> None:
    with suppress(ConnectionError):
        link.sendall(sent)


# -- ranks that meet --------------------------------------------------------------------------------------------------


def words(address: tuple[str, int], *, rank: int = 1, ranks: int = 4, reached: bool = False, left: Any = None) -> str:
    missing = MissingRanks(rank, ranks, Timeouts())
    missing.address, missing.reached = address, reached
    missing.ranks = left or missing.ranks
    return missing._message("has waited")


def test_a_master_address_that_does_not_resolve_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", fail)
    for rank in (0, 1):
        assert re.fullmatch(
            rf"rank {rank} has waited 0 s for rank 0 at nowhere:29500 \(MASTER_ADDR and MASTER_PORT\): 'nowhere' does "
            r"not resolve to an address \(\[Errno -2\] Name or service not known\); set MASTER_ADDR to rank 0's host",
            words(("nowhere", 29500), rank=rank),
        )


def test_a_port_where_rank_0_is_not_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"for rank 0 at 127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT), where something listens" in words(
            ("127.0.0.1", port)
        )
    said = words(("127.0.0.1", port))
    assert f"for rank 0 at 127.0.0.1:{port} (MASTER_ADDR and MASTER_PORT), where nothing answers" in said
    assert said.endswith("; set the same address and port on every rank")


def test_who_has_come_is_said_with_the_address_and_the_number_of_ranks() -> None:
    assert words(("a", 29500), rank=0, reached=True, left=(2,)) == (
        "rank 0 has waited 0 s for rank 2, which has not called penstock.pipeline yet; with WORLD_SIZE=4 ranks 0, 1, 3 "
        "came to a:29500"
    )
    many = words(("a", 29500), rank=0, ranks=1000, reached=True, left=(2,))
    assert many.endswith("; with WORLD_SIZE=1000 the other 999 ranks came to a:29500")


@pytest.mark.parametrize("sizes", [(2, 3), (3, 2, 3)])
def test_ranks_with_another_world_size_are_refused_by_all(
    sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of two jobs that come to one port."""
    monkeypatch.setattr(joining, "_LONGEST_LOOK_SECONDS", 0.2)
    store, said = dist.HashStore(), dict[int, str]()

    def come(rank: int, ranks: int) -> None:
        try:
            Meeting(store, rank, ranks).await_all(MissingRanks(rank, ranks, Timeouts(join_seconds=20)))
        except RankFailedError as failure:
            said[rank] = str(failure)

    threads = [threading.Thread(target=come, args=(rank, ranks)) for rank, ranks in enumerate(sizes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank, size in enumerate(sizes):
        told = re.match(
            rf"rank {rank} stops: it has WORLD_SIZE={size}, and rank (\d), which came to .*, has WORLD_SIZE=(\d);",
            said[rank],
        )
        assert told
        assert sizes[int(told[1])] == int(told[2]) != size


def test_a_second_process_with_the_same_rank_is_refused() -> None:
    store = dist.HashStore()
    Meeting(store, 1, 2)
    parent = process._stat(os.getppid())[1]
    store.set("rank 1 process 1", json.dumps([process.Process.here().machine, os.getppid(), parent]))
    with pytest.raises(
        RankFailedError, match=f"rank 1 stops: process {os.getppid()} has RANK=1, too; set another RANK"
    ):
        Meeting(store, 1, 2).await_all(MissingRanks(1, 2, Timeouts(join_seconds=5)))


def test_what_a_dead_store_means_is_said() -> None:
    for error, says in (
        ("code: -98, name: EADDRINUSE", "another process listens at a:1 (MASTER_ADDR and MASTER_PORT)"),
        ("reset\nby peer", "the store at a:1 (MASTER_ADDR and MASTER_PORT), which rank 0 or its agent keeps, is"),
    ):
        missing = MissingRanks(1, 2, Timeouts())
        missing.address = ("a", 1)
        with pytest.raises(RankFailedError, match=re.escape(f"rank 1 stops: {says}")) as caught, missing:
            raise dist.DistNetworkError(error)
        assert "\n" not in str(caught.value)


def test_ranks_that_are_missing_are_named_again_and_again(capsys: pytest.CaptureFixture[str]) -> None:
    said, missing = "", MissingRanks(0, 3, Timeouts(warn_seconds=0.02))
    with missing:
        while said.count("\n") < 2:
            missing._finished.wait(0.02)  # the main thread may be blocked
            said += capsys.readouterr().err
    one = r"penstock: rank 0 has waited \d+ s for ranks 1, 2, which have not called penstock\.pipeline yet"
    assert all(re.fullmatch(one, line) for line in said.splitlines())


GOOD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "2", "from 0 to 1"),
        ("RANK", None, "from 0 to 1"),
        ("RANK", "9" * 9999, "from 0 to 1"),
        ("WORLD_SIZE", "two", "from 1 to"),
        ("WORLD_SIZE", "0", "from 1 to"),
        ("MASTER_PORT", "70000", "from 1 to 65535"),
    ],
)
def test_what_the_environment_may_not_say_is_refused_at_once(
    name: str, value: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, given in (GOOD | {name: value}).items():
        monkeypatch.delenv(key, raising=False) if given is None else monkeypatch.setenv(key, given)
    with pytest.raises(ArgumentError, match=rf"^{name}=.{{,100}} in the environment.*{expected}") as caught:
        joining.start("gloo")
    assert len(str(caught.value)) < 400


# -- the offset of another host's clock, from exchanges of messages ---------------------------------------------------


THERE = 7_000_000


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The time here, of which the first entry counts."""
    now = [1000]
    monkeypatch.setattr(host_clock, "now_ns", lambda: now[0])
    return now


def exchange(offset: HostOffset, now: list[int], there_ns: int, back_ns: int) -> None:
    """A question takes `there_ns` to the other host, and its answer `back_ns`."""
    asked = now[0]
    now[0] += there_ns + back_ns
    offset.add_exchange(asked, THERE + asked + there_ns)


def test_the_shortest_round_trip_counts(here: list[int]) -> None:
    offset = HostOffset("elsewhere")
    assert offset.nanoseconds == 0
    for there_ns, back_ns in ((900, 100), (10, 14), (50, 400)):
        exchange(offset, here, there_ns, back_ns)
    assert offset.nanoseconds == THERE - 2


def test_old_exchanges_are_forgotten(here: list[int]) -> None:
    """Since clocks drift apart."""
    offset = HostOffset("elsewhere")
    exchange(offset, here, 1, 1)
    for _ in range(MAX_EXCHANGES):
        exchange(offset, here, 40, 0)
    assert offset.nanoseconds == THERE + 20


def test_one_clock_needs_no_offset_and_another_some_exchanges(here: list[int]) -> None:
    shared, offset = HostOffset(host_clock.clock_name()), HostOffset("elsewhere")
    exchange(shared, here, 3, 5)
    assert (shared.nanoseconds, shared.needs_more) == (0, False)
    for _ in range(INITIAL_EXCHANGES):
        assert offset.needs_more
        exchange(offset, here, 1, 1)
    assert not offset.needs_more
