"""Torch's own runtime loads and runs schedules that Penstock wrote, on gloo, with the gradients of one device; and
schedules that torch wrote load here, are legal, and are timed.

Torch's classes that read and write CSV are private: without them there is nothing to test.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

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

PipelineStage: Any = pytest.importorskip("torch.distributed.pipelining").PipelineStage
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


Gradients = dict[str, Tensor]


def task(stages: int, microbatches: int) -> tuple[list[nn.Module], Tensor, Tensor]:
    """A layer a stage, inputs and targets. Microbatches have the same number of rows, all different."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(stages)]
    return list(layers), torch.randn(2 * microbatches, 5), torch.randn(2 * microbatches, 5)


def gradients(layers: list[nn.Module], only: list[int]) -> Gradients:
    """By stage and name. A parameter without a gradient is left out, which the comparison of the names finds."""
    return {
        f"{stage}.{name}": parameter.grad
        for stage in only
        for name, parameter in layers[stage].named_parameters()
        if parameter.grad is not None
    }


def in_torch(rank: int, text: str, format: Any, rank_of: tuple[int, ...], microbatches: int, steps: int = 1) -> Any:
    """The output, on the last stage's rank, and the gradients of the rank's stages."""
    layers, x, y = task(len(rank_of), microbatches)
    mine = [stage for stage, owner in enumerate(rank_of) if owner == rank]
    stages = [PipelineStage(layers[stage], stage, len(rank_of), torch.device("cpu")) for stage in mine]
    made = runtime(stages, microbatches, F.mse_loss)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "schedule.csv")
        path.write_text(text, newline="")
        made._load_csv(str(path), format)
    for _ in range(steps):
        for layer in layers:
            layer.zero_grad()
        output = made.step(*([x] if 0 in mine else []), target=y if len(rank_of) - 1 in mine else None)
    return None if output is None else output.detach(), gradients(layers, mine)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "format"), [*((name, "compute_comms") for name in CASES), ("by hand", "compute_only")]
)
def test_torch_runs_it_with_right_gradients(ranks2: Ranks, name: str, format: Format) -> None:
    schedule = CASES[name]()
    assert not [violation for violation in check(schedule) if violation.fatal]
    placement, m = schedule.placement, schedule.microbatches
    got = ranks2.run(in_torch, to_csv(schedule, format), format, placement.rank_of, m, 2)
    layers, x, y = task(placement.stages, m)
    output = nn.Sequential(*layers)(x)
    F.mse_loss(output, y).backward()
    wanted = gradients(layers, [*range(placement.stages)])
    torch.testing.assert_close(got[placement.rank_of[-1]][0], output.detach())
    found = {name: gradient for _, gradients in got for name, gradient in gradients.items()}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, msg=lambda text, name=name: f"{name}: {text}")


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
    write_csv(read_csv(tmp_path / "compute_comms.csv"), tmp_path / "ours.csv", "compute_comms")
    assert (tmp_path / "ours.csv").read_bytes() == (tmp_path / "compute_comms.csv").read_bytes()
    costs = StageCost(1.0, 1.0, 1.0)
    timelines = [simulate(schedule, costs) for schedule in loaded.values()]
    work = 3.0 * theirs.microbatches * theirs.placement.stages / theirs.placement.ranks
    assert timelines[0].makespan_seconds == timelines[1].makespan_seconds > work
    assert [timelines[0].busy_seconds(rank) for rank in range(order.ranks)] == [work] * order.ranks
