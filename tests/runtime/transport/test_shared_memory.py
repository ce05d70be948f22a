"""Slots of shared memory, both ends in one process: what is put in comes out, whatever the order and the shapes; and
the sockets at which ranks meet for it."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock._base.stages import Link
from penstock.runtime.exact.rules import Layout
from penstock.runtime.transport.agreement import Agreement
from penstock.runtime.transport.neighbors import _HELLO, Neighbors
from penstock.runtime.transport.shared_memory import SLOTS, _SlotRing

pytestmark = pytest.mark.skipif(not Neighbors.supported(), reason="this system has no such shared memory")

LINK = Link(0, 1, ((0, "a"), (0, "b")))


def message(microbatch: int) -> list[Tensor | None]:
    """Of other shapes and strides in each microbatch; the second value is sometimes absent."""
    generator = torch.Generator().manual_seed(microbatch)
    first = torch.randn(microbatch + 1, 5, generator=generator)
    return [first.t().contiguous().t() if microbatch % 2 else first, None if microbatch == 2 else first.half()]


@pytest.fixture
def ends() -> Iterator[tuple[_SlotRing, _SlotRing]]:
    """The sender's and the receiver's, which have agreed on the layouts of six messages."""
    agreement = Agreement(LINK)
    for k in range(6):
        agreement.learn(k, [None if tensor is None else Layout.of(tensor) for tensor in message(k)])
    size = max(map(_SlotRing.slot_bytes, agreement.all()))
    memory = os.memfd_create("test")
    os.ftruncate(memory, size * SLOTS)
    mine, theirs = socket.socketpair()
    lanes = _SlotRing(os.dup(memory), mine, size, agreement), _SlotRing(memory, theirs, size, agreement)
    yield lanes
    for lane in lanes:
        lane.close()


def assert_same(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is not None and other is not None:
            assert torch.equal(mine, other)
            assert mine.stride() == other.stride()
            assert mine.dtype == other.dtype


def test_a_sender_waits_until_a_slot_is_free(ends: tuple[_SlotRing, _SlotRing]) -> None:
    """A message that was not taken yet is never written over."""
    sender, receiver = ends
    sent: list[int] = []

    def send() -> None:
        for k in range(6):
            sender.put(k, message(k))
            sent.append(k)

    thread = threading.Thread(target=send)
    thread.start()
    thread.join(0.2)
    assert len(sent) == SLOTS
    for k in range(6):
        assert_same(receiver.take(k), message(k))
    thread.join(10)
    assert sent == list(range(6))


# -- the sockets at which the ranks of one machine connect: nobody else is let in, or keeps a rank out -----------------


Doors = list[tuple[str, int, str, bytes]]
Attack = Callable[[Doors], None]
HELD: list[socket.socket] = []
"""What a stranger keeps open."""


def meet(attack: Attack, ranks: int = 3) -> tuple[list[Neighbors], Doors]:
    """Connects ranks, each a thread. `attack` comes between: all ranks listen, and none has connected."""
    doors: list[Any] = [None] * ranks
    attacked = threading.Barrier(ranks, lambda: attack(doors))
    made: list[Any] = [None] * ranks

    def create(rank: int) -> None:
        def gather(value: Any) -> list[Any]:
            doors[rank] = value[1]
            attacked.wait(30)
            return [*enumerate(doors)][::-1]  # a mesh may have its processes in another order

        made[rank] = Neighbors(rank, gather)

    threads = [threading.Thread(target=create, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(50)
    assert None not in made, "all ranks have connected"
    return made, doors


def assert_connected(made: list[Neighbors]) -> None:
    """Each pair of ranks talks over both of its connections."""
    for rank, here in enumerate(made):
        for peer in here.ranks:
            for mine, theirs in ((here._connections, made[peer]._connections), (here.lines, made[peer].lines)):
                mine[peer].sendall(bytes([rank, peer]))
                assert theirs[rank].recv(2) == bytes([rank, peer])
    assert [here.ranks for here in made] == [frozenset(range(len(made))) - {rank} for rank in range(len(made))]
    for here in made:
        here.close()


def call(name: str, sent: bytes) -> None:
    """Connects and stays."""
    stranger = socket.socket(socket.AF_UNIX)
    stranger.connect(name)
    with suppress(ConnectionError):
        stranger.sendall(sent)
    HELD.append(stranger)


def knock(doors: Doors) -> None:
    """What a stranger may try who reads the names of all sockets in /proc/net/unix."""
    for _, _, name, _ in doors:
        guesses = [_HELLO.pack(peer, kind, bytes(16)) for peer in range(3) for kind in range(2)]
        for sent in (b"", b"\0", b"x" * 100, _HELLO.pack(-1, 9, name.encode()[-16:]), *guesses):
            call(name, sent)
        with socket.socket(socket.AF_UNIX) as leaves:
            leaves.connect(name)


def knock_with_the_secret(doors: Doors) -> None:
    for _, _, name, secret in doors:
        call(name, _HELLO.pack(2, 0, secret))


class Stranger:
    """Another process that attacks when it is told to, and stays."""

    def __init__(self, attack: Attack, user: int) -> None:
        self._there, here = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            with suppress(BaseException):
                self._there.close()
                os.setuid(user)
                attack(eval(here.recv(1 << 16)))
                here.sendall(b"done")
                here.recv(1)
            os._exit(0)
        here.close()

    def attack(self, doors: Doors) -> None:
        self._there.settimeout(30)
        self._there.sendall(repr(doors).encode())
        assert self._there.recv(4) == b"done"

    def end(self) -> None:
        self._there.close()
        os.waitpid(self.pid, 0)


NOBODY = 65534


@pytest.mark.parametrize("user", [NOBODY, os.getuid()], ids=["another user", "another process"])
@pytest.mark.parametrize("attack", [knock, knock_with_the_secret])
def test_strangers_are_mentioned_once_and_ignored(user: int, attack: Attack, capfd: pytest.CaptureFixture[str]) -> None:
    if user != os.getuid() and os.getuid() != 0:
        pytest.skip("only root can be another user")
    stranger = Stranger(attack, user)
    try:
        made, _ = meet(stranger.attack)
        assert_connected(made)
    finally:
        stranger.end()
    said = capfd.readouterr().err.splitlines()
    line = f"ignores connections from process {stranger.pid} of user {user}, which is none of its peers"
    assert sorted(said) == [f"penstock: rank {rank} {line}" for rank in (0, 1)]


def test_a_process_that_the_kernel_does_not_tell_apart_needs_the_secret() -> None:
    """Which is so in some sandboxes: all connections seem to come from this process."""

    def guess(doors: Doors) -> None:
        for _, _, name, _ in doors:
            for sent in (_HELLO.pack(2, 0, bytes(16)), _HELLO.pack(1, 1, name.encode()[-16:])):
                call(name, sent)

    made, doors = meet(guess)
    assert_connected(made)
    names = [name for _, _, name, _ in doors]
    assert len(set(names)) == 3
    assert not any(secret.hex() in name or secret in name.encode() for *_, secret in doors for name in names)


def test_whoever_takes_the_name_of_a_rank_that_ended_is_not_shown_its_secret() -> None:
    name = f"\0penstock-test-{os.getpid()}"
    taker = Stranger(lambda doors: impersonate_at(doors[0][2]), os.getuid())
    taker.attack([("", 0, name, b"")])
    try:
        gathered: list[Any] = []

        def gather(value: Any) -> list[Any]:
            _, own = value
            gathered[:] = [(0, (own[0], own[1], name, bytes(16))), value]
            return gathered

        with pytest.raises(ConnectionError, match="another process has taken its socket's name"):
            Neighbors(1, gather)
    finally:
        taker.end()


def impersonate_at(name: str) -> None:
    door = socket.socket(socket.AF_UNIX)
    door.bind(name)
    door.listen()
    HELD.append(door)
