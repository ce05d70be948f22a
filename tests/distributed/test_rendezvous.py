"""A rank that waits for others at the start says for whom and where, and what is wrong with how they were started."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from typing import Any

import pytest
import torch.distributed as dist

from penstock._base import process
from penstock._base.errors import ArgumentError, RankFailedError
from penstock.distributed import host_clock, joining
from penstock.distributed.failure_detector import Timeouts
from penstock.distributed.host_clock import INITIAL_EXCHANGES, MAX_EXCHANGES, HostOffset
from penstock.distributed.joining import Meeting, MissingRanks


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
