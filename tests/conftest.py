"""What several folders of tests use: ranks, how hypothesis is run, and what the collector of garbage leaves alone."""

import gc
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from scaffolding.ranks import Ranks

pytest_plugins = ["penstock.testing.fixtures"]

# How long an example takes depends on the machine, so no test fails for being slow.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there once tests are collected stays: a million objects, which each full collection would look at."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


FOLDERS_ALONE = ("fabric", "network")
"""Where those that run alone are: the Makefile collects no others for them."""

LONGEST_FIRST = (
    "distributed",
    "cli",
    "proof",
    "search",
    "integrations",
    "test_zoo_matrix.py",
    "test_transformers_zoo.py",
)
"""Folders and files whose tests take long. What is begun last must be short, or the other workers wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def top(item: pytest.Item) -> str:
        return item.path.relative_to(Path(__file__).parent).parts[0]

    for item in items:
        if item.get_closest_marker("alone") and top(item) not in FOLDERS_ALONE:
            raise pytest.UsageError(f"{item.nodeid} is to run alone: move it to one of the folders {FOLDERS_ALONE}")
    rank = {name: place for place, name in enumerate(LONGEST_FIRST)}
    items.sort(key=lambda item: rank.get(top(item), len(rank)))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As the ranks of a pool have it: bits depend on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
