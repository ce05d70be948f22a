"""One table for all: every generator goes through the same tests, with what the registry says of it."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock._base.errors import ArgumentError
from penstock.schedule import (
    Placement,
    Schedule,
    check,
    generate,
    grid,
    names,
    peak_activations,
    schedule_specs,
)
from penstock.schedule.generators import ScheduleParams, ScheduleSpec, interleaved_1f1b
from penstock.simulate import simulate
from penstock.simulate.costs import StageCost
from scaffolding.some_schedules import generated

GENERATORS = schedule_specs()
registry = import_module("penstock.schedule.generators")  # a function has the same name in penstock.schedule
REGULAR = [(2, 4), (2, 8), (4, 8), (4, 16), (6, 12), (8, 24)]
"""Ranks and microbatches for which the registry's formulas hold."""


@given(generated(max_ranks=16, max_microbatches=64))
def test_every_generator_is_legal_and_exact(schedule: Schedule) -> None:
    assert check(schedule) == []


def values(entry: Any, p: int, m: int, **more: float) -> dict[str, Any]:
    return {"p": p, "m": m, "v": entry.chunks, "min": min, "max": max, **more}


@pytest.mark.parametrize("entry", GENERATORS, ids=lambda entry: entry.name)
@pytest.mark.parametrize(("p", "m"), REGULAR)
def test_memory_is_what_the_registry_says(entry: Any, p: int, m: int) -> None:
    schedule = generate(entry.name, p, m)
    held = [peak / entry.chunks for peak in peak_activations(schedule)]
    if entry.memory is None:
        assert max(held) <= p
    else:
        exact = [eval(entry.memory, values(entry, p, m, r=r)) for r in range(p)]
        bound = entry.name in ("v-half", "v-min", "zb-v")  # there it is the largest of all ranks
        assert max(held) == max(exact) if bound else held == exact


@pytest.mark.parametrize("entry", [entry for entry in GENERATORS if not entry.idle], ids=lambda entry: entry.name)
@pytest.mark.parametrize(("p", "m"), REGULAR[:4])
def test_idle_time_without_a_formula_is_below_half_a_round(entry: Any, p: int, m: int) -> None:
    for costs in ((1, 1, 1), (8, 8, 5), (10, 9, 7)):
        f, i, w = (each / entry.chunks for each in costs)
        span = simulate(generate(entry.name, p, m), StageCost(f, i, w)).span_seconds
        assert m * sum(costs) * (1 - 1e-9) <= span < (m + 1.5 * p) * sum(costs)


@pytest.mark.parametrize("entry", [entry for entry in GENERATORS if entry.idle], ids=lambda entry: entry.name)
@given(st.sampled_from(REGULAR[:-1]), st.tuples(*[st.integers(0, 20)] * 3).filter(any))
def test_idle_time_holds_for_any_costs(entry: Any, numbers: tuple[int, int], costs: tuple[int, int, int]) -> None:
    """Where a weight gradient is cheap and where it is dear; never below 0."""
    f, i, w = costs
    i = f if "F == I" in entry.idle else i
    w = f if "I == W" in entry.idle else w
    idle = eval(entry.idle, values(entry, *numbers, F=f, I=i, W=w))
    scale, share = 12, 12 // entry.chunks
    timeline = simulate(generate(entry.name, *numbers), StageCost(share * f, share * i, share * w))
    assert idle >= 0
    assert timeline.span_seconds == scale * (numbers[1] * (f + i + w) + idle)


@pytest.mark.parametrize("entry", GENERATORS, ids=lambda entry: entry.name)
@pytest.mark.parametrize(("p", "m"), REGULAR)
def test_the_bubble_is_what_the_registry_says(entry: Any, p: int, m: int) -> None:
    measured = simulate(generate(entry.name, p, m), StageCost(1, 1, 1)).bubble_rate
    assert (entry.bubble is None) == (entry.idle is None)
    if entry.bubble is not None:
        assert measured == pytest.approx(eval(entry.bubble, values(entry, p, m)), abs=1e-12)


def pictured() -> list[tuple[Callable[..., Schedule], tuple[int, ...]]]:
    """Each exported generator that draws itself, with the numbers that the docstring names."""
    found = []
    for name in registry.__all__:
        made = getattr(registry, name)
        numbers = re.search(r"With (\d+) ranks?(?:,| and) (\d+) microbatches", inspect.getdoc(made) or "")
        if numbers:
            found.append((made, tuple(map(int, numbers.groups()))))
    return found


PICTURES = pictured()


@pytest.mark.parametrize(("make", "numbers"), PICTURES, ids=lambda value: getattr(value, "__name__", None))
def test_the_docstring_draws_what_the_generator_makes(make: Callable[..., Schedule], numbers: tuple[int, int]) -> None:
    drawn = textwrap.indent(grid(make(*numbers), width=112), "    ")
    assert drawn in (inspect.getdoc(make) or "")


def test_every_generator_has_a_picture_and_a_source() -> None:
    assert len(PICTURES) == len(GENERATORS)
    for make, _ in PICTURES:
        assert re.search(r"\b(19|20)\d\d\b|no paper", inspect.getdoc(make) or ""), make.__name__


@given(st.integers(1, 8), st.integers(1, 32), st.integers(1, 4))
def test_interleaved_has_its_bubble_for_any_number_of_microbatches(p: int, m: int, v: int) -> None:
    makespan = simulate(interleaved_1f1b(p, m, v), StageCost(1, 1, 1)).makespan_seconds
    assert makespan == 3 * (m * v + p - 1) if m >= p else makespan >= 3 * (m * v + p - 1)


@pytest.mark.parametrize(
    ("name", "here"),
    [
        ("Schedule1F1B", "'1f1b'"),
        ("scheduleinterleaved1f1b", "'interleaved-1f1b'"),
        ("LoopedBFS", "'looped-bfs'"),
        ("ScheduleInterleavedZeroBubble", r"penstock.schedule.read_csv\('order.csv'\)"),
        ("ZBVZeroBubble", "'zb-v'"),
        ("DUALPIPEV", "'dualpipe-v'"),
        ("TrainSchedule", "'1f1b'"),
    ],
)
def test_a_name_of_torchs_leads_to_the_one_here(name: str, here: str) -> None:
    with pytest.raises(ArgumentError, match=rf"did you mean {here}\?"):
        generate(name, ranks=2, microbatches=4)


def test_names() -> None:
    assert generate("ZB-H1", 2, 2) == generate("zb-h1", 2, 2)
    assert generate("afab", 3, 5) == generate("gpipe", 3, 5)
    assert "afab" not in names()
    said = r"did you mean 'gpipe'\? expected one of naive, gpipe, 1f1b, interleaved-1f1b"
    with pytest.raises(ArgumentError, match=said):
        generate("G-Pipe", 2, 2)


@pytest.mark.parametrize(
    ("name", "numbers", "message"),
    [
        ("1f1b", (2, 2, 2), "stages_per_rank=2: 1f1b works with exactly 1 stage per rank"),
        ("zb-v", (2, 2, 1), "stages_per_rank=1: zb-v works with exactly 2 stages per rank, placed as a V"),
        ("hanayo", (2, 2, 3), "stages_per_rank=3: hanayo works with an even number of stages per rank"),
        ("chimera", (3, 2), "ranks=3: chimera works with an even number of ranks"),
        ("dualpipe", (4, 7), "microbatches=7: dualpipe works with an even number of microbatches"),
        ("naive", (0, 1), "ranks=0: expected an integer >= 1"),
        ("gpipe", (2, 0), "microbatches=0: expected an integer >= 1"),
        ("gpipe", (2, 2, 0), "stages_per_rank=0: expected an integer >= 1"),
    ],
)
def test_what_is_not_allowed(name: str, numbers: tuple[int, ...], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        generate(name, *numbers)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("entry", schedule_specs(), ids=lambda entry: entry.name)
def test_a_generator_says_before_it_makes_a_schedule_whether_it_fits(entry: ScheduleSpec, chunks: int) -> None:
    numbers = ScheduleParams(4, 8, chunks)
    try:
        made = generate(entry.name, 4, 8, chunks)
    except ArgumentError:
        made = None
    for placement in (Placement.loop(4, chunks), Placement.wave(4), Placement.bidirectional(4)):
        assert entry.fits(numbers, placement) == (made is not None and made.placement == placement)
