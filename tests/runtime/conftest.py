from collections.abc import Iterator

import pytest

from scaffolding.ranks import Ranks


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here."""


@pytest.fixture(scope="session")
def device_rank() -> Iterator[Ranks]:
    """A process for jobs with the stand-in device (`scaffolding.stand_in`), which no other test may have."""
    pool = Ranks(1)
    yield pool
    pool.stop()
