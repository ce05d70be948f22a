"""`transport=` takes a factory: sockets of an example's own carry what is exact, refused and ended as over our own."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import penstock
from distributed import jobs
from penstock import ArgumentError, pipeline
from penstock._base.errors import ShapeError
from penstock._base.stages import Link
from penstock.runtime.execute.transport_choice import TRANSPORTS, TransportSpec
from penstock.runtime.transport import Agreement, Endpoint, PointToPoint, from_bytes, to_bytes
from penstock.runtime.transport.routes import LocalChannel, LocalTransport
from penstock.testing import check_factory, check_transport
from penstock.testing.transport_scripts import scripts_for
from scaffolding.local_collectives import CollectiveTransport, collective_transports
from scaffolding.ranks import Ranks
from scaffolding.small import batch, mlp
from scaffolding.tcp import EXAMPLES_OWN, sockets

pytestmark = pytest.mark.distributed


CLOSED: list[int] = []
"""The ranks whose transport was closed."""


class Half:
    """Messages, and one of the two collectives."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._rank = endpoint.rank

    def connect(self, *_: Any) -> None: ...

    channel = release = end_step = drop_step = broadcast = connect

    def close(self) -> None:
        CLOSED.append(self._rank)


def only_on(rank: int, endpoint: Endpoint) -> Any:
    """Sockets on one rank, and nothing on others."""
    made = sockets(endpoint)
    return made if endpoint.rank == rank else None


def refused(rank: int) -> dict[str, str]:
    """What each wrong factory is told, and what the sockets give afterwards."""
    task = jobs.mlp()
    said = {}

    def attempt(name: str, transport: Any) -> None:
        try:
            penstock.pipeline(task.model, task.args, loss_fn=task.loss, transport=transport)
        except penstock.PenstockError as error:
            said[name] = f"{type(error).__name__}: {error}"

    attempt("another", sockets if rank == 0 else "auto")
    attempt("other factories", sockets if rank == 0 else partial(only_on, 0))
    attempt("half", Half)
    said["closed"] = str(CLOSED)
    attempt("nothing on rank 1", partial(only_on, 0))
    said["then"] = jobs.verify(rank, "mlp", {"microbatches": 3, "transport": sockets})[1]
    return said


def verify_by_name(rank: int) -> str:
    """What a row in the table of transports gives."""
    TRANSPORTS["sockets"] = TransportSpec(factory=sockets)  # type: ignore[index]
    try:
        return jobs.verify(rank, "mlp", {"microbatches": 3, "transport": "sockets"})[1]
    finally:
        del TRANSPORTS["sockets"]  # type: ignore[arg-type]


def test_conformance_of_two_threads() -> None:
    assert check_factory(sockets) == [script.__name__ for script in scripts_for(collectives=False)]


def test_the_kit_ends_where_a_message_never_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def keeping(endpoint: Endpoint) -> PointToPoint:
        made.append(sockets(endpoint))
        return made[-1]

    monkeypatch.setattr("penstock.testing.transports.WAIT_SECONDS", 2.0)
    monkeypatch.setattr(EXAMPLES_OWN.Sockets, "put", lambda self, peer, key, message: None)
    with pytest.raises(
        AssertionError,
        match=r"rank 1 in values_keep_bits_strides_and_alignment.*: a message that was sent has not arrived",
    ):
        check_factory(keeping)
    for one in made:
        one.close()


def test_conformance_with_the_collectives_of_torch(ranks2: Ranks) -> None:
    assert ranks2.run(jobs.conform, sockets) == [("Combined", jobs.SCRIPTS)] * 2


def test_verified_over_sockets(ranks3: Ranks) -> None:
    """A tie, and a value that every stage uses."""
    options = {"schedule": "zb-v", "microbatches": 6, "transport": sockets}
    for ok, summary, _ in ranks3.run(jobs.verify, "deep_with_dropout", options):
        assert ok, summary


def test_a_transport_has_a_name_by_one_row(ranks2: Ranks) -> None:
    assert all("bitwise identical" in summary for summary in ranks2.run(verify_by_name))


def test_a_rank_that_is_done_first_fails_nobody(ranks3: Ranks) -> None:
    assert ranks3.run(jobs.end_early, sockets, False) == [3, 3, 3]


def test_what_is_wrong_is_refused_on_every_rank(ranks2: Ranks) -> None:
    first, second = ranks2.run(refused)
    other = "and rank 1 'auto'; every rank must pass the same"
    assert first["another"] == f"ArgumentError: transport: rank 0 has scaffolding.tcp.sockets, {other}"
    assert "transport: rank 1 has 'auto', and rank 0 scaffolding.tcp.sockets" in second["another"]
    assert "rank 1 test_transport_factory.only_on" in first["other factories"]
    for said in (first, second):
        assert "made an object of Half, which lacks reduce; expected an object with the methods" in said["half"]
    assert (first["closed"], second["closed"]) == ("[0]", "[1]")
    assert (
        "test_transport_factory.only_on made nothing (None), which lacks connect, channel,"
        in second["nothing on rank 1"]
    )
    assert first["nothing on rank 1"].startswith("RankFailedError: rank 0 stops: rank 1 failed")
    assert "made nothing (None)" in first["nothing on rank 1"]
    assert all("bitwise identical" in said["then"] for said in (first, second))


def test_one_process_needs_no_transport() -> None:
    x, y = batch()

    def refuses(_: object) -> None:
        raise AssertionError

    with pipeline(mlp(), (x,), ranks=2, loss_fn=lambda a, b: (a - b).square().mean(), transport=refuses) as pipe:
        pipe.step(x, target=y)
    expected = "transport=3: expected one of 'auto', 'distributed', 'staged', or a function of a"
    with pytest.raises(ArgumentError, match=expected):
        pipeline(mlp(), (x,), ranks=2, transport=3)


# -- the conformance kit finds transports that mix up messages, and names what they lack ------------------------------


Mailbox = dict[Any, "queue.Queue[Any]"]


class Posted:
    """One end of a channel through a mailbox that both ranks share, as files in one folder would be."""

    seconds = 5.0  # that a message is waited for

    def __init__(self, box: Mailbox, key: Any, link: Link) -> None:
        self.box, self.key, self.agreement = box, key, Agreement(link)

    def send(self, microbatch: int, tensors: Any) -> None:
        layouts = self.agreement.check(microbatch, tensors)
        parts = [None if t is None else (layout, to_bytes(t)) for layout, t in zip(layouts, tensors, strict=True)]
        self.place(microbatch).put(parts)

    def place(self, microbatch: int) -> queue.Queue[Any]:
        return self.box.setdefault((*self.key, microbatch), queue.Queue())  # either rank may be the first to look

    def post(self, microbatch: int) -> None: ...

    def receive(self, microbatch: int) -> list[Any]:
        parts = self.place(microbatch).get(timeout=self.seconds)
        return [part and from_bytes(part[1], part[0], torch.device("cpu")) for part in parts]


def shared_mailbox(key: Callable[[int, Link, bool], Any], kind: type[Posted] = Posted) -> Any:
    """A factory of transports whose channels have this key."""
    box: Mailbox = {}

    class Shared:
        def __init__(self, endpoint: Endpoint) -> None:
            self.channels: list[tuple[int, Posted]] = []

        def connect(self, source_rank: int, target_rank: int) -> None: ...

        def channel(self, number: int, link: Link, source_rank: int, target_rank: int, *, backward: bool) -> Posted:
            made = kind(box, key(number, link, backward), link)
            self.channels.append((number, made))
            return made

        def end_step(self) -> None:
            for _, channel in self.channels:
                channel.agreement.end_step()

        def release(self, number: int) -> None: ...

        def drop_step(self) -> None: ...

        def close(self) -> None: ...

    return Shared


def test_a_mailbox_that_both_ranks_share_conforms() -> None:
    names = check_factory(shared_mailbox(lambda number, link, backward: (number, link, backward)))
    assert names == [script.__name__ for script in scripts_for(collectives=False)]


@pytest.mark.parametrize(
    ("key", "script"),
    [
        (lambda number, link, backward: (number, link), "directions_of_a_link_do_not_mix"),
        (lambda number, link, backward: (number, backward), "links_of_two_ranks_do_not_mix"),
    ],
)
def test_a_key_that_leaves_something_out_is_found(key: Any, script: str) -> None:
    with pytest.raises((AssertionError, queue.Empty)) as error:
        check_factory(shared_mailbox(key))
    if isinstance(error.value, AssertionError):
        assert str(error.value).startswith(f"{script}: ")
    assert f"penstock: in the script {script}" in error.value.__notes__


def test_what_a_transport_lacks_is_named() -> None:
    with pytest.raises(AssertionError, match=r"rank [01]'s transport is a NoneType, which lacks connect, "):
        check_factory(lambda endpoint: None)  # type: ignore[arg-type, return-value]


class Transposed(Posted):
    """Loses strides."""

    def receive(self, microbatch: int) -> list[Any]:
        return [None if part is None else part.contiguous() for part in super().receive(microbatch)]


def test_a_transport_that_loses_strides_is_found() -> None:
    with pytest.raises(AssertionError, match=r"a tensor arrived with other values|strides .* became"):
        check_factory(shared_mailbox(lambda *key: key, Transposed))


class Late(Posted):
    """Sends a little later, as from a queue of its own, unless it is closed before."""

    seconds = 2.0

    def __init__(self, box: Mailbox, key: Any, link: Link) -> None:
        super().__init__(box, key, link)
        self.queue = ThreadPoolExecutor(1)

    def send(self, microbatch: int, tensors: Any) -> None:
        self.agreement.check(microbatch, tensors)
        self.queue.submit(time.sleep, 0.02)
        self.queue.submit(super().send, microbatch, list(tensors))


def test_a_close_that_drops_what_is_under_way_is_found() -> None:
    made = shared_mailbox(lambda *key: key, Late)

    def close(self: Any) -> None:
        for _, channel in self.channels:
            channel.queue.shutdown(cancel_futures=True)

    made.close = close
    with pytest.raises(queue.Empty) as error:
        check_factory(made)
    assert "penstock: in the script what_was_sent_arrives_after_close" in error.value.__notes__


@pytest.mark.parametrize(
    ("broken", "script"),
    [
        ("CollectiveTransport", "a_dropped_step_leaves_nothing"),
        ("LocalChannel", "a_dropped_step_leaves_nothing"),
        ("Sum", "a_dropped_step_leaves_no_sums"),
    ],
)
def test_a_dropped_step_that_leaves_something_is_found(
    broken: str, script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = LocalChannel if broken == "LocalChannel" else CollectiveTransport
    monkeypatch.setattr(owner, "drop_step", LocalTransport.drop_step if broken == "Sum" else lambda self: None)
    with pytest.raises((AssertionError, ShapeError)) as error:
        check_transport(collective_transports())
    assert f"penstock: in the script {script}" in error.value.__notes__
