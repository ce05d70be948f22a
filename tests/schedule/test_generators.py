from __future__ import annotations

import inspect
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st
from some_schedules import generated

from penstock.errors import ArgumentError
from penstock.schedule import Op, Schedule, check, generate, generators, grid, names, peak_activations
from penstock.schedule.generators import gpipe, naive, one_f_one_b

GENERATORS = generators()


@given(generated())
def test_every_generator_is_legal_and_exact(schedule: Schedule) -> None:
    assert check(schedule) == []


@given(st.integers(1, 8), st.integers(1, 32))
def test_peak_activations_are_those_of_the_papers(p: int, m: int) -> None:
    assert peak_activations(generate("naive", p, m)) == [1] * p
    assert peak_activations(generate("gpipe", p, m)) == [m] * p
    assert peak_activations(generate("1f1b", p, m)) == [min(p - r, m) for r in range(p)]


def slots(schedule: Schedule) -> int:
    return len(grid(schedule, width=100_000).splitlines()[0].split("|")[1].split())


@given(st.integers(1, 8), st.integers(1, 32))
def test_slots_are_those_of_the_bubble(p: int, m: int) -> None:
    assert slots(generate("naive", p, m)) == 2 * p * m
    assert slots(generate("gpipe", p, m)) == 2 * (m + p - 1)
    assert slots(generate("1f1b", p, m)) == 2 * (m + p - 1)


@pytest.mark.parametrize(("make", "p", "m"), [(naive, 3, 2), (gpipe, 4, 4), (one_f_one_b, 4, 6)])
def test_the_docstring_draws_what_the_generator_makes(make, p: int, m: int) -> None:  # type: ignore[no-untyped-def]
    drawn = textwrap.indent(grid(make(p, m)), "    ")
    assert drawn in (inspect.getdoc(make) or "")
    assert f"{p} ranks and {m} microbatches" in (inspect.getdoc(make) or "")


def test_naive_takes_a_microbatch_there_and_back() -> None:
    assert str(naive(2, 2, chunks=2).rows[0]) == "0F0 2F0 2B0 0B0 0F1 2F1 2B1 0B1"


def test_gpipe_goes_chunk_by_chunk_and_back() -> None:
    assert str(gpipe(2, 2, chunks=2).rows[1]) == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


def test_1f1b_warms_up_alternates_and_cools_down() -> None:
    ops = ["".join(action.op.value for action in row) for row in one_f_one_b(4, 6).rows]
    assert ops == ["FFFFBFBFBBBB", "FFFBFBFBFBBB", "FFBFBFBFBFBB", "FBFBFBFBFBFB"]


def test_1f1b_with_fewer_microbatches_than_ranks() -> None:
    assert [str(row) for row in one_f_one_b(4, 1).rows] == ["0F0 0B0", "1F0 1B0", "2F0 2B0", "3F0 3B0"]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda g: g.name)
def test_registry_describes_each(generator) -> None:  # type: ignore[no-untyped-def]
    assert generator.name in names()
    assert generator.rule
    schedule = generate(generator.name, 4, 6)
    assert schedule.name == generator.name
    known = {"p": 4, "m": 6, "min": min}
    assert peak_activations(schedule) == [eval(generator.memory, {**known, "r": r}) for r in range(4)]
    compute = 2 * 6 / slots(schedule)
    assert 1 - compute == pytest.approx(eval(generator.bubble, known))


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(ArgumentError, match=r"did you mean 'gpipe'\? known are naive, gpipe, 1f1b"):
        generate("G-Pipe", 2, 2)


@pytest.mark.parametrize("argument", ["ranks", "microbatches", "chunks"])
@pytest.mark.parametrize("value", [0, -1, 1.5])
def test_numbers_below_1_are_refused_by_name(argument: str, value: float) -> None:
    numbers = {"ranks": 2, "microbatches": 2, "chunks": 1, argument: value}
    with pytest.raises(ArgumentError, match=f"{argument}={value}"):
        generate("gpipe", **numbers)  # type: ignore[arg-type]


def test_1f1b_refuses_chunks_and_says_its_rule() -> None:
    with pytest.raises(ArgumentError, match=r"chunks=2: 1f1b works with exactly 1 chunk a rank"):
        generate("1f1b", 2, 2, chunks=2)


def test_generators_write_compute_only() -> None:
    for name in names():
        assert {a.op for row in generate(name, 3, 3).rows for a in row} == {Op.F, Op.B}
