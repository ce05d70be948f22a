"""Under NCCL's rules, imposed on gloo: every schedule, with skips and ties, from the first step on.

Each cell runs under the rules without `device_id=` and under those with it (`eager`).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import nccl_jobs
import pytest
import torch.distributed as dist
from nccl_jobs import BUGS, MICROBATCHES, MODELS, RULES, Cell

from penstock._base.errors import ArgumentError
from penstock.schedule import schedule_spec, schedule_specs
from penstock.schedule.generators import ScheduleParams
from penstock.testing.nccl import nccl_rules
from penstock.testing.transport_scripts import scripts_for
from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed

RANKS = (2, 3, 4)
SECONDS = 60.0
"""For one cell, on a crowded machine. One takes half a second."""


def cells(schedule: str, ranks: int, model: str, eager: bool = False) -> Iterator[Cell]:
    """With one and two chunks where the schedule takes them; one kind of batch or the other is timed."""
    for chunks in (1, 2):
        if schedule_spec(schedule).violated_constraint(ScheduleParams(ranks, MICROBATCHES, chunks)) is None:
            timed = (list(MODELS).index(model) + chunks) % 2 == 0
            yield Cell(schedule, model, ranks * chunks, chunks, (timed, not timed), eager=eager)


SHORT = [
    ("1f1b", 3, "a tie", True),
    ("interleaved-1f1b", 2, "a skip over two cuts", False),
    ("1f1b-v", 2, "a skip over one cut", True),
    ("zb-h1", 3, "a skip over one cut", False),
    ("chimera", 2, "a skip over two cuts", True),
]
"""A schedule of each family: one and several stages a rank, a V, a split backward, two copies."""
LONG = [
    (g.name, ranks, model, eager)
    for (s, g), (r, ranks), (m, model), eager in product(
        enumerate(schedule_specs()), enumerate(RANKS), enumerate(MODELS), (False, True)
    )
    if (s + r + m + eager) % 4 == 0
    if any(cells(g.name, ranks, model)) and (g.name, ranks, model, eager) not in SHORT
]
"""Each schedule with each number of ranks under both rules, and with each model."""


@pytest.mark.parametrize(("schedule", "p", "model", "eager"), long_after(len(SHORT), *SHORT, *LONG))
def test_every_step_is_that_of_one_device(
    schedule: str, p: int, model: str, eager: bool, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    mine = list(cells(schedule, p, model, eager))
    assert mine
    for cell in mine:
        assert ranks.run(nccl_jobs.train, cell, seconds=SECONDS) == [[]] * p, cell


@pytest.mark.parametrize("eager", long_after(1, True, False))
def test_layouts_are_learned_under_the_rules_beside_shared_memory(ranks4: Ranks, eager: bool) -> None:
    cell = Cell("interleaved-1f1b", "a skip over two cuts", 8, 2, (False, True), "auto", eager)
    assert ranks4.run(nccl_jobs.train, cell, seconds=SECONDS) == [[]] * 4


@pytest.mark.parametrize("schedule", long_after(1, "dualpipe", "chimera"))
def test_the_second_step_needs_no_kernel_that_the_first_has_not_loaded(ranks4: Ranks, schedule: str) -> None:
    """Ranks 1 and 2 each await the other's first gradient when they compute their own. On an H100 both hung."""
    cell = Cell(schedule, "a skip over two cuts", 4, 1, (False, False), lazy_loading=True)
    assert ranks4.run(nccl_jobs.train, cell, seconds=SECONDS) == [[]] * 4


@pytest.mark.parametrize("mesh", nccl_jobs.MESHES)
def test_replicas_and_a_part_of_the_job_where_the_default_group_has_a_device(ranks4: Ranks, mesh: str) -> None:
    ranks = len(nccl_jobs.MESHES[mesh][-1])  # of a pipeline
    cell = Cell("interleaved-1f1b", "a skip over one cut", 2 * ranks, 2, (False, True), eager=True)
    assert ranks4.run(nccl_jobs.train_over, mesh, cell, seconds=SECONDS) == [[]] * 4


def test_groups_of_two_are_only_those_that_exchange_messages(ranks4: Ranks) -> None:
    chain = Cell("1f1b", "chain", 4, 1, (False, False), eager=True)
    assert ranks4.run(nccl_jobs.groups_of_two, chain) == [2, 4, 4, 2]
    assert ranks4.run(nccl_jobs.groups_of_two, chain._replace(eager=False)) == [0, 0, 0, 0]
    skipping = chain._replace(model="a skip over one cut")
    assert ranks4.run(nccl_jobs.groups_of_two, skipping) == [4, 6, 6, 4]


CAUGHT = {
    "receives in the order of use": Cell("interleaved-1f1b", "a skip over two cuts", 4, 2, (False, False)),
    "pairs meet at their first message": Cell("chimera", "chain", 4, 1, (False, False)),
    "timed by synchronizing": Cell("1f1b", "chain", 2, 1, (True, False)),
    "all pairs share two groups": Cell("1f1b", "a skip over two cuts", 4, 1, (False, False), eager=True),
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
    assert (
        ranks2.run(nccl_jobs.conform, seconds=SECONDS)
        == [[script.__name__ for script in scripts_for(collectives=True)]] * 2
    )


def test_eager_rules_need_the_default_group() -> None:
    assert not dist.is_initialized()
    with (
        pytest.raises(ArgumentError, match=r"call torch.distributed.init_process_group before"),
        nccl_rules(eager=True),
    ):
        pass
