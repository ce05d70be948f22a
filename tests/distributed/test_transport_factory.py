"""`transport=` takes a factory: sockets of an example's own carry what is exact, refused and ended as over our own."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

import penstock
from distributed import jobs
from penstock import ArgumentError, pipeline
from penstock.runtime.execute.transport_choice import TRANSPORTS, TransportSpec
from penstock.runtime.transport import Endpoint, PointToPoint
from penstock.testing import check_factory
from penstock.testing.transport_scripts import scripts_for
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
    assert (
        ranks2.run(jobs.conform, sockets)
        == [("Combined", [script.__name__ for script in scripts_for(collectives=True)])] * 2
    )


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
