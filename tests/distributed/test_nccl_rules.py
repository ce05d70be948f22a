"""Under NCCL's rules, imposed on gloo: every schedule, with skips and ties, from the first step on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nccl_jobs
import pytest
from nccl_jobs import BUGS, MICROBATCHES, MODELS, RULES, Cell

from penstock.schedule import generator, generators
from penstock.schedule.generators import Numbers
from penstock.testing.transport_scripts import SCRIPTS
from scaffolding.ranks import Ranks, RanksError

pytestmark = pytest.mark.distributed

RANKS = (2, 3, 4)
SECONDS = 60.0
"""For one cell, on a crowded machine. One takes half a second."""


def cells(schedule: str, ranks: int, model: str) -> Iterator[Cell]:
    """With one and two chunks where the schedule takes them; one kind of batch or the other is timed."""
    for chunks in (1, 2):
        if generator(schedule).broken(Numbers(ranks, MICROBATCHES, chunks)) is None:
            timed = (list(MODELS).index(model) + chunks) % 2 == 0
            yield Cell(schedule, model, ranks * chunks, chunks, (timed, not timed))


RUN = [g.name for g in generators() if g.slices == 1]


def cases(schedule: str, turn: int) -> list[Any]:
    """All that the schedule allows. All are long, but for one: the next model and number of ranks for each schedule."""
    allowed = [(ranks, model) for ranks in RANKS for model in MODELS if any(cells(schedule, ranks, model))]
    short = allowed[5 * turn % len(allowed)]  # there are 4, 8 or 12
    return [pytest.param(schedule, *one, marks=() if one == short else pytest.mark.long) for one in allowed]


CASES = [case for turn, schedule in enumerate(RUN) for case in cases(schedule, turn)]


@pytest.mark.parametrize(("schedule", "p", "model"), CASES)
def test_every_step_is_that_of_one_device(schedule: str, p: int, model: str, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    for cell in cells(schedule, p, model):
        assert ranks.run(nccl_jobs.train, cell, seconds=SECONDS) == [[]] * p, cell


def test_the_short_cases_have_every_schedule_and_every_model() -> None:
    short = [case.values for case in CASES if not case.marks]
    assert {schedule for schedule, _, _ in short} == set(RUN)
    assert {model for _, _, model in short} == set(MODELS)
    assert {ranks for _, ranks, _ in short} == set(RANKS)
    assert {chunks for case in short for chunks in (cell.chunks for cell in cells(*case))} == {1, 2}


def test_layouts_are_learned_under_the_rules_beside_shared_memory(ranks4: Ranks) -> None:
    cell = Cell("interleaved-1f1b", "a skip over two cuts", 8, 2, (False, True), "auto")
    assert ranks4.run(nccl_jobs.train, cell, seconds=SECONDS) == [[]] * 4


CAUGHT = {
    "receives_in_the_order_of_use": Cell("interleaved-1f1b", "a skip over two cuts", 4, 2, (False, False)),
    "no_connection": Cell("chimera", "chain", 4, 1, (False, False)),
    "timed_by_synchronizing": Cell("1f1b", "chain", 2, 1, (True, False)),
}
"""A cell that does not survive the bug."""


@pytest.mark.long
@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_caught(bug: str, request: pytest.FixtureRequest) -> None:
    cell = CAUGHT[bug]
    ranks: Ranks = request.getfixturevalue(f"ranks{cell.stages // cell.chunks}")
    assert ranks.run(nccl_jobs.train, cell, seconds=SECONDS) == [[]] * ranks.n
    try:
        found = ranks.run(nccl_jobs.with_bug, cell, bug, seconds=15.0)
    except RanksError:
        return  # it hung, or raised
    assert any(found)


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_kept(ranks2: Ranks, rule: str) -> None:
    ranks2.run(nccl_jobs.assert_rule, rule, seconds=SECONDS)


def test_the_rules_with_a_device_id(ranks3: Ranks) -> None:
    ranks3.run(nccl_jobs.assert_one_communicator_for_all, seconds=SECONDS)


def test_conformance(ranks2: Ranks) -> None:
    assert ranks2.run(nccl_jobs.conform, seconds=SECONDS) == [[script.__name__ for script in SCRIPTS]] * 2
