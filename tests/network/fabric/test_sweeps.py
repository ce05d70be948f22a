"""Sizes by hand and sweeps: those that were asked for, and no others."""

from __future__ import annotations

import pytest

from penstock._base.errors import ArgumentError
from penstock.network.fabric.workload import MAX_SIZES, Workload


def sizes(workload: Workload) -> list[int]:
    return [transfer.bytes for transfer in workload.transfers]


def test_a_sweep_has_both_its_ends() -> None:
    assert sizes(Workload.sweep(1024, 8192)) == [1024, 2048, 4096, 8192]
    assert sizes(Workload.sweep(1024, 10_000, 3)) == [1024, 3072, 9216]
    assert sizes(Workload.sweep(4096, 4096)) == [4096]


@pytest.mark.parametrize("steps", range(1, 12))
def test_a_factor_that_no_float_holds_still_reaches_the_end(steps: int) -> None:
    """As with nccl-tests' `-f`, but any root of the whole range will do."""
    made = sizes(Workload.sweep(1024, 2**26, 2 ** (16 / steps)))
    assert (made[0], made[-1], len(made)) == (1024, 2**26, steps + 1)
    assert all(size % 4 == 0 for size in made)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ((1026, 4096), r"a sweep from 1026 bytes: pass a multiple of the element size, 4 bytes, above 0"),
        ((0, 4096), r"a sweep from 0 bytes: .* above 0"),
        ((8192, 4096), r"a sweep from 8192 to 4096 bytes is empty"),
        ((1024, 4096, 1.0), r"factor is 1.0: pass a factor above 1"),
        ((1024, 2**26, 1.0001), rf"factor is 1.0001: .* more than {MAX_SIZES:,} sizes"),
    ],
)
def test_a_sweep_that_cannot_be_sent_is_refused(given: tuple[float, ...], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Workload.sweep(*given)  # type: ignore[arg-type]


def test_the_same_size_again_has_a_name_of_its_own() -> None:
    made = Workload.from_sizes([4096, 2600, 4096])
    assert [transfer.name for transfer in made.transfers] == ["4KiB", "2600", "4KiB #2"]
