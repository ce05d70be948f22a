"""The conformance kit finds transports that mix up messages, and names what they lack."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from penstock._base.errors import ShapeError
from penstock._base.stages import Link
from penstock.runtime.transport import Agreement, Endpoint, from_bytes, to_bytes
from penstock.runtime.transport.routes import LocalChannel, LocalTransport
from penstock.testing import check_factory, check_transport
from penstock.testing.transport_scripts import scripts_for
from scaffolding.local_collectives import CollectiveTransport, collective_transports

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


class Transposed(Posted):
    """Loses strides."""

    def receive(self, microbatch: int) -> list[Any]:
        return [part and part.contiguous() for part in super().receive(microbatch)]


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


def test_what_a_transport_lacks_is_named() -> None:
    class Half:
        def __init__(self, endpoint: Endpoint) -> None: ...

        def connect(self, source_rank: int, target_rank: int) -> None: ...

    with pytest.raises(AssertionError, match=r"rank [01]'s transport is a Half, which lacks channel, "):
        check_factory(Half)  # type: ignore[arg-type]
