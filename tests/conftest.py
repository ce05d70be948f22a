"""Fixtures that several folders of tests use."""

from collections.abc import Iterator

import pytest

from distributed.ranks import Ranks


def _pool(n: int) -> Iterator[Ranks]:
    pool = Ranks(n)
    yield pool
    pool.stop()


@pytest.fixture(scope="session")
def ranks2() -> Iterator[Ranks]:
    """Two real ranks in a gloo group; started at the first job."""
    yield from _pool(2)


@pytest.fixture(scope="session")
def ranks3() -> Iterator[Ranks]:
    """Three real ranks in a gloo group; started at the first job."""
    yield from _pool(3)


@pytest.fixture(scope="session")
def ranks4() -> Iterator[Ranks]:
    """Four real ranks in a gloo group; started at the first job."""
    yield from _pool(4)
