"""The processes that are compared run with as many threads. Some tests have a pool of their own."""

from collections.abc import Iterator

import pytest

from scaffolding.ranks import Ranks


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here."""


@pytest.fixture(scope="module")
def own_pair() -> Iterator[Ranks]:
    """Two processes for the tests of one file, which leave a stand-in device behind that no other test may have."""
    yield from _pool(2)


@pytest.fixture(scope="module")
def own_four() -> Iterator[Ranks]:
    """Four processes for the tests of one file, as `own_pair`."""
    yield from _pool(4)


def _pool(n: int) -> Iterator[Ranks]:
    ranks = Ranks(n)
    yield ranks
    ranks.stop()
