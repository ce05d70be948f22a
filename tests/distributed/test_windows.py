"""Sharded stages that are gathered within a window, in real processes: the same bits, less memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import window_jobs
from window_jobs import Seen

from penstock.schedule import Action, Op, Schedule
from penstock.simulate import StageCost, memory, simulate
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed

SEEN: dict[str, list[Seen]] = {}
"""What several tests look at, by what was asked for."""


def run(ranks: Ranks, window: int | None, rows: Sequence[int] = (6, 6), **options: Any) -> list[Seen]:
    asked = str((window, rows, sorted(options.items())))
    if asked not in SEEN:
        SEEN[asked] = ranks.run(window_jobs.train, window, 2, rows, options)
    return SEEN[asked]


def case(schedule: str, chunks: int, window: int, microbatches: int = 3, **more: Any) -> Any:
    usual = {"schedule": schedule, "stages_per_rank": chunks, "layers": 2 * chunks, "microbatches": microbatches}
    options = {**usual, **more}
    return pytest.param(options, window, id=f"{schedule}-{chunks}-{window}-{'-'.join(more)}")


def same_bits(one: Seen, other: Seen) -> None:
    assert [float(loss) for loss in other.losses] == [float(loss) for loss in one.losses]
    assert other.gradients.keys() == one.gradients.keys()
    assert all(torch.equal(gradient, one.gradients[name]) for name, gradient in other.gradients.items())
    assert torch.equal(other.evaluated, one.evaluated)
    assert other.share == one.share


LONG = [
    case("interleaved-1f1b", 3, 2),
    case("dualpipe-v", 2, 2, 6),
    case("interleaved-1f1b", 3, 2, recompute=1),
    case("interleaved-1f1b", 3, 2, offload=True),
    case("zb-v", 2, 1, 4, half=True),
    case("interleaved-1f1b", 3, 2, compiled=True),
]


@pytest.mark.parametrize(
    ("options", "window"),
    [
        case("zb-v", 2, 1, 4),
        *(pytest.param(*each.values, id=each.id, marks=pytest.mark.long) for each in LONG),
    ],
)
def test_a_window_changes_no_bit_and_bounds_what_is_gathered(
    ranks4: Ranks, options: dict[str, Any], window: int
) -> None:
    plain, windowed = run(ranks4, None, **options), run(ranks4, window, **options)
    for place, (one, other) in enumerate(zip(plain, windowed, strict=True)):
        same_bits(one, other)
        assert all(stage in there and len(there) <= window for stage, there in other.gathered)
        assert other.left == one.left == frozenset()
        assert max(len(there) for _, there in one.gathered) == options["stages_per_rank"], "without a window they stay"
        for seen, room in ((one, options["stages_per_rank"]), (other, min(window, options["stages_per_rank"]))):
            predicted, real = courses(seen, place % 2)
            assert real == predicted
            assert max(real) == room
            if "recompute" not in options:
                assert seen.gathered == there_by_schedule(seen, place % 2)


def courses(seen: Seen, rank: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """How many stages are gathered over time: predicted by a simulation, and by the clock of the run."""
    assert seen.timeline is not None
    schedule, cost = Schedule.parse(seen.schedule), StageCost(1, 1, 1, unsharded_bytes=1)
    simulated, real = (memory(schedule, cost, each)[rank] for each in (simulate(schedule, cost), seen.timeline))
    return simulated.unsharded, real.unsharded


def there_by_schedule(seen: Seen, rank: int) -> list[tuple[int, frozenset[int]]]:
    """In each forward and backward, its stage and those whose parameters have been waited for, by the rank's own
    numbers.
    """
    schedule, there, found = Schedule.parse(seen.schedule), set[int](), []
    own = schedule.placement.stages_on(rank)
    for action in schedule.rows[rank]:
        if action.op is Op.RESHARD:
            there.remove(own.index(action.stage))
        elif action.op.is_compute:
            there.add(own.index(action.stage))
            if action.op is not Op.W:
                found.append((own.index(action.stage), frozenset(there)))
    return found


def test_a_gather_is_on_its_way_while_the_action_before_runs(ranks4: Ranks) -> None:
    """The action before the stage's first one finds it gathered by the schedule, but not yet in its place."""
    options, window = case("interleaved-1f1b", 3, 2).values
    seen = run(ranks4, window, (6, 2), **options)[0]
    assert seen.timeline is not None
    row = list(seen.timeline.tracks[0].actions)
    ahead = row.index(Action(2, Op.UNSHARD))
    computing = [action for action in row[ahead:] if action.op.is_compute]
    assert [str(action) for action in computing[:2]] == ["0F2", "2F0"]
    assert seen.gathered[2:4] == [(0, frozenset({0})), (1, frozenset({1}))], "by the rank's own numbers: 0 and 2"


@pytest.mark.long  # test_combined.py has such replicas
def test_replicas_with_fewer_rows_gather_alike(ranks4: Ranks) -> None:
    options, window = case("interleaved-1f1b", 3, 2).values
    for one, other in zip(run(ranks4, None, (6, 2), **options), run(ranks4, window, (6, 2), **options), strict=True):
        same_bits(one, other)
        assert all(stage in there and len(there) <= window for stage, there in other.gathered)
    assert other.timeline is not None
    ran = {action.microbatch for track in other.timeline.tracks for action in track.actions if action.op.is_compute}
    assert ran == {0, 1}, "two rows make two microbatches, where the other replica has three"
