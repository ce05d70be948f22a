"""A lower bound is one: no algorithm is faster, in however many pieces; and it is not below what has to be sent."""

from __future__ import annotations

from typing import get_args

import pytest

from penstock.errors import ArgumentError
from penstock.fabric.bounds import lower_bound_seconds
from penstock.fabric.models import LinkFit, known_algorithms, predict
from penstock.fabric.steps import Collective

LINK = LinkFit(1e-4, 8e-8)
"""100 Mbit/s."""
SLOW = LinkFit(5e-4, 8e-7)
KINDS = get_args(Collective)


def _ring(hosts: int, link: LinkFit = LINK) -> list[tuple[tuple[int, int], LinkFit]]:
    return [((host, (host + 1) % hosts), link) for host in range(hosts)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4, 64 * 1024, 8 * 1024**2])
def test_no_algorithm_is_faster_in_however_many_pieces(kind: str, size: int) -> None:
    for ranks in (2,) if kind == "send" else (2, 3, 4, 7, 16):
        bound = lower_bound_seconds(_ring(ranks), kind, range(ranks), size)
        assert bound is not None
        took = [
            predict(LINK, kind, name, ranks, size, k) for name in known_algorithms(kind) for k in (1, 2, 8, 64, 999)
        ]
        assert bound <= min(took) * (1 + 1e-9)
        assert bound > LINK.alpha_seconds


@pytest.mark.parametrize(
    ("kind", "factor"),
    [("all_reduce", 1.5), ("all_gather", 0.75), ("reduce_scatter", 0.75), ("all_to_all", 0.75), ("broadcast", 1),
     ("reduce", 1), ("gather", 0.75), ("scatter", 0.75), ("sendrecv", 1)],
)  # fmt: skip
def test_what_has_to_pass_a_port_does(kind: str, factor: float) -> None:
    assert lower_bound_seconds(_ring(4), kind, range(4), 1e6) == pytest.approx(1e-4 + factor * 0.08)


def test_of_an_uneven_all_to_all_the_busiest_port_decides() -> None:
    def bound(shares: tuple[int, ...]) -> float | None:
        return lower_bound_seconds(_ring(4), "all_to_all", range(4), 1e6, shares)

    assert bound((1, 1, 1, 1)) == bound(()) == pytest.approx(1e-4 + 0.75 * 0.08)
    assert bound((5, 1, 1, 1)) == pytest.approx(1e-4 + 15 / 8 * 0.08), "into the first"
    assert bound((2, 2, 2, 0)) == pytest.approx(1e-4 + 0.08), "out of the last"


def test_a_slow_host_counts_where_it_has_to_send_or_receive() -> None:
    links = [((0, 1), LINK), ((1, 2), SLOW), ((2, 3), SLOW), ((3, 0), LINK)]

    def bound(kind: str) -> float | None:
        return lower_bound_seconds(links, kind, range(4), 1e6)

    assert bound("broadcast") == pytest.approx(5e-4 + 0.8)
    assert bound("all_to_all") == pytest.approx(5e-4 + 0.6)
    assert bound("all_reduce") == pytest.approx(5e-4 + 0.8), "in and out once: it may be the leaf of a tree"
    assert bound("gather") == pytest.approx(5e-4 + 0.2), "it sends a quarter only"


def test_directions_may_differ() -> None:
    links = [((0, 1), LINK), ((1, 0), SLOW)]
    assert lower_bound_seconds(links, "send", (0, 1), 1e6) == pytest.approx(1e-4 + 0.08)
    assert lower_bound_seconds(links, "send", (1, 0), 1e6) == pytest.approx(1e-4 + 0.8)


def test_a_port_is_as_fast_as_its_fastest_link_and_its_nearest_neighbour_is_near() -> None:
    """Whom it sends to is the algorithm's choice; where it sends first, too."""
    links = [((0, 1), LINK), ((0, 2), SLOW), ((2, 0), SLOW), ((1, 0), LINK)]
    assert lower_bound_seconds(links, "send", (0, 1), 1e6) == pytest.approx(1e-4 + 0.08)
    assert lower_bound_seconds(links, "send", (1, 0), 1e6) == pytest.approx(1e-4 + 0.08)


def test_without_links_there_is_no_bound() -> None:
    assert lower_bound_seconds([], "all_reduce", range(4), 1e6) is None
    assert lower_bound_seconds(_ring(2, LinkFit(1e-4, 0.0)), "all_reduce", (0, 1), 1e6) == pytest.approx(1e-4)
    with pytest.raises(ArgumentError, match="'shuffle' is not a collective: known are all_reduce"):
        lower_bound_seconds(_ring(2), "shuffle", (0, 1), 4)
