"""The offset of another host's clock, from exchanges of messages."""

from __future__ import annotations

import pytest

from penstock.distributed import host_clock
from penstock.distributed.host_clock import INITIAL_EXCHANGES, MAX_EXCHANGES, HostOffset

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
