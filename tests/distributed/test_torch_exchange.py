"""Torch's own runtime loads and runs schedules that Penstock wrote, on gloo, with the gradients of one device; and
schedules that torch wrote load here, are legal, and are timed.

Torch's classes that read and write CSV are private: without them there is nothing to test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch_jobs

from penstock.schedule import (
    Format,
    Op,
    Placement,
    Row,
    Schedule,
    add_communication,
    check,
    from_csv,
    generate,
    read_csv,
    split_backward,
    to_csv,
    write_csv,
)
from penstock.simulate import simulate
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import search
from scaffolding.ranks import Ranks

schedules: Any = pytest.importorskip("torch.distributed.pipelining.schedules")
runtime: Any = getattr(schedules, "_PipelineScheduleRuntime", None)

pytestmark = pytest.mark.skipif(
    not hasattr(runtime, "_load_csv"), reason=f"torch {torch.__version__} has no runtime that loads CSV"
)

# -- from Penstock to torch -------------------------------------------------------------------------------------------

FORMATS: tuple[Format, ...] = ("compute_only", "compute_comms")

BY_HAND = Schedule(
    "weights late, overlaps, stages 1 and 2 together",
    Placement.v(2),
    3,
    [
        Row.parse("0F0 0F1 3F0 3I0 0F2 (3F1;0I0)OVERLAP_F_B 3W0 3I1 3F2 0W0 3B2 0I1 3W1 0W1 0B2"),
        Row.parse("1F0 2F0 1F1 2I0 1I0 2F1 1F2 2W0 (2F2;2B1)OVERLAP_F_B 1I1 2I2 1I2 1W0 1W1 2W2 1W2"),
    ],
)


def found(placement: Placement, costs: list[StageCost]) -> Schedule:
    """What the search finds for stages that differ: no generator's order."""
    best = search(placement, 4, costs, LinkCost(0.2), memory_limit=3, seconds=0.3)
    assert best.baseline is None or best.objective_seconds < best.baseline_seconds
    return best.schedule


CASES: dict[str, Callable[[], Schedule]] = {
    "1f1b split": lambda: split_backward(generate("1f1b", 2, 4)),
    "gpipe with two chunks": lambda: generate("gpipe", 2, 3, 2),
    "by hand": lambda: BY_HAND,
    "found, in a V": lambda: found(Placement.v(2), [StageCost(2, 3, 1), StageCost(1, 1, 2)] * 2),
}


def assert_torch_runs_it_right(pool: Ranks, schedule: Schedule, format: Format, steps: int = 1) -> None:
    """Runs it in torch, and compares output and gradients with those of the unsplit model."""
    placement, m = schedule.placement, schedule.microbatches
    got = pool.run(torch_jobs.in_torch, to_csv(schedule, format), format, placement.rank_of, m, steps)
    output, wanted = torch_jobs.on_one_device(placement.stages, m)
    torch.testing.assert_close(got[placement.rank_of[-1]][0], output)
    found = {name: gradient for _, gradients in got for name, gradient in gradients.items()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "format"), [*((name, "compute_comms") for name in CASES), ("by hand", "compute_only")]
)
def test_torch_runs_it_with_right_gradients(ranks2: Ranks, name: str, format: Format) -> None:
    schedule = CASES[name]()
    assert not [violation for violation in check(schedule) if violation.fatal]
    assert_torch_runs_it_right(ranks2, schedule, format, steps=2)


# -- from torch to Penstock -------------------------------------------------------------------------------------------


class Theirs(NamedTuple):
    """A schedule of torch's, by the name of its class."""

    name: str
    placement: Placement
    microbatches: int


THEIRS = [
    Theirs("Interleaved1F1B", Placement.loop(3), 6),  # with one stage a rank, 1F1B
    Theirs("Interleaved1F1B", Placement.loop(2, 5), 4),
    Theirs("LoopedBFS", Placement.loop(2, 2), 3),
    Theirs("InterleavedZeroBubble", Placement.loop(2, 2), 4),
    Theirs("ZBVZeroBubble", Placement.v(4), 8),
    Theirs("DualPipeV", Placement.v(4), 10),
]
SHARDING = (Op.UNSHARD, Op.RESHARD)


def made_by_torch(name: str, placement: Placement, microbatches: int) -> Any:
    """Torch's schedule object: on stages that know their numbers only, for nothing is run."""
    kind = schedules.get_schedule_class(name)
    stage = SimpleNamespace(
        num_stages=placement.stages, group_size=placement.ranks, group_rank=0, submod=None, stage_index=0
    )
    stages = [stage] * (placement.stages // placement.ranks)
    many = issubclass(kind, schedules.PipelineScheduleMulti)
    return kind(stages if many else stage, microbatches, loss_fn=lambda output, target: output)


@pytest.mark.parametrize("theirs", THEIRS, ids=str)
def test_torchs_schedules_load_are_legal_and_timed(tmp_path: Path, theirs: Theirs) -> None:
    made = made_by_torch(*theirs)
    loaded = {}
    for format in FORMATS:
        made._dump_csv(str(tmp_path / f"{format}.csv"), format=format)
        loaded[format] = read_csv(tmp_path / f"{format}.csv", theirs.name, drop=SHARDING)
        assert loaded[format].placement == theirs.placement
        assert loaded[format].microbatches == theirs.microbatches
        assert not [violation for violation in check(loaded[format]) if violation.fatal]
    order = loaded["compute_only"]
    assert from_csv(to_csv(loaded["compute_comms"]), theirs.name) == order
    add_communication(order)  # and our own messages are possible in it
    costs = StageCost(1.0, 1.0, 1.0)
    timelines = [simulate(schedule, costs) for schedule in loaded.values()]
    work = 3.0 * theirs.microbatches * theirs.placement.stages / theirs.placement.ranks
    assert timelines[0].makespan_seconds == timelines[1].makespan_seconds > work
    assert [timelines[0].busy_seconds(rank) for rank in range(order.ranks)] == [work] * order.ranks


@pytest.mark.parametrize("theirs", THEIRS, ids=str)
def test_torchs_files_are_written_again_to_the_byte(tmp_path: Path, theirs: Theirs) -> None:
    made_by_torch(*theirs)._dump_csv(str(tmp_path / "torch.csv"), format="compute_comms")
    write_csv(read_csv(tmp_path / "torch.csv"), tmp_path / "ours.csv", "compute_comms")
    assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "torch.csv").read_bytes()
