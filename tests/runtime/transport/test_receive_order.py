"""Receives from one rank start in the order in which they were posted, and none is waited for before it must be."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.transport.distributed import ReceiveOrder

Started = list[tuple[str, int]]


class Receiver:
    def __init__(self, name: str, started: Started, known: bool = True) -> None:
        self.name, self.can_start = name, known
        self._started = started

    def has_started(self, microbatch: int) -> bool:
        return (self.name, microbatch) in self._started

    def start(self, microbatch: int) -> None:
        self._started.append((self.name, microbatch))


def test_what_would_wait_holds_up_what_was_posted_behind_it() -> None:
    """Back ends without tags match messages by their order."""
    started: Started = []
    way: ReceiveOrder = ReceiveOrder()
    learning, known = Receiver("learning", started, known=False), Receiver("known", started)
    way.post(known, 0)
    assert started == [("known", 0)]
    way.post(learning, 0)
    way.post(known, 1)
    way.post(learning, 1)
    assert started == [("known", 0)], "to post never waits"
    way.start_until(known, 1)
    assert started == [("known", 0), ("learning", 0), ("known", 1)], "no more than it must"
    way.start_until(learning, 1)
    assert started[-1] == ("learning", 1)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_the_order_is_that_of_posts(posts: list[tuple[bool, bool]]) -> None:
    started: Started = []
    receivers = Receiver("learning", started, known=False), Receiver("known", started)
    way: ReceiveOrder = ReceiveOrder()
    expected = []
    for microbatch, (which, used_at_once) in enumerate(posts):
        expected.append((receivers[which].name, microbatch))
        way.post(receivers[which], microbatch)
        if used_at_once:
            way.start_until(receivers[which], microbatch)
            assert started == expected
    assert started == expected[: len(started)]
