"""Shared setup for the tests: pools of ranks, hypothesis's profile, the order of tests, and garbage collection."""

import gc
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from scaffolding.ranks import Ranks

pytest_plugins = ["penstock.testing.fixtures", "scaffolding.browser"]

# An example's time depends on the machine, so no test fails for being slow. Thirty are tried, a third of hypothesis's
# number, unless a test says otherwise: most bugs show in the first few, and each run tries others.
settings.register_profile("few untimed", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("few untimed")

TESTS = Path(__file__).parent


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Freezes what exists once tests are collected: a million objects that every full collection would visit."""
    gc.disable()
    try:
        return (yield)
    finally:
        _freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Freezes what is left after each file: mostly modules that its tests have imported."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        _freeze()
    return done


def _freeze() -> None:
    gc.collect()
    gc.freeze()


ALONE = "network"
"""The folder with tests that run alone: the Makefile collects no other for those."""

TELLING = (
    "test_traps.py",
    "test_traps_between.py",
    "network",
    "checkpoint",
    "plan",
    "costs",
    "runtime/transport",
    "runtime/loss",
    "runtime/step",
    "runtime/gradients",
    "pipe",
    "cli/test_cli_simulate.py",
)
"""Folders and files that see much for the time that they take. They start first: one test for each trap of this field,
then what saw 31 of 66 bugs that were planted (docs/testing.md). On two processors all are done within two and a half
minutes.
"""

LONGEST = (
    "distributed",
    "cli",
    "verification",
    "simulate",
    "integrations",
    "test_zoo_matrix.py",
    "test_transformers_zoo.py",
)
"""Folders and files whose tests take long. They come next: if one started last, the other workers would wait for it."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = [TESTS / name for name in TELLING + LONGEST]
    assert all(path.exists() for path in order), [str(path) for path in order if not path.exists()]

    @cache
    def turn(path: Path) -> int:
        within = {path, *path.parents}
        return next((place for place, first in enumerate(order) if first in within), len(order))

    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if item.get_closest_marker("alone") and folder != ALONE:
            raise pytest.UsageError(f"{item.nodeid} is to run alone: move it to tests/{ALONE}")
    items.sort(key=lambda item: turn(item.path))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread, as in the ranks of a pool: results depend on the number of threads bit by bit."""
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


@pytest.fixture(scope="session")
def device_rank() -> Iterator[Ranks]:
    """A process for jobs with the stand-in device (`scaffolding.stand_in`), which no other test may have."""
    yield from _pool(1)
