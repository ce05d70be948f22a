"""Sharded stages that are gathered within a window, in real processes: the same bits, less memory."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from mesh_jobs import mesh_of, part
from shard_jobs import Block, Blocks, inputs, whole
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import penstock
from penstock.schedule import Action, Op, Schedule
from penstock.schedule.timeline import Timeline
from penstock.simulate import StageCost, memory, simulate
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


class Seen(NamedTuple):
    """Of the last step.

    Attributes:
        gathered: in each forward and backward of a block: its stage, and all stages whose parameters are in memory.
        left: the stages whose parameters are in memory after the step.
        timeline: of all ranks of this process's pipeline.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor]
    evaluated: Tensor
    schedule: str
    gathered: list[tuple[int, frozenset[int]]]
    left: frozenset[int]
    timeline: Timeline | None
    share: dict[int, float]


class Gathered:
    """Shards stages, and looks at the memory of each one's whole parameters whenever a block runs.

    Args:
        half: blocks compute in bfloat16 and reduce in float32.
        compiled: blocks are compiled.
    """

    def __init__(self, mesh: DeviceMesh, *, half: bool, compiled: bool) -> None:
        dtype = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32} if half else {}
        self._shard = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtype))
        self._compiled = compiled
        self._whole: dict[int, list[Tensor]] = {}
        self.seen: list[tuple[int, frozenset[int]]] = []

    def shard(self, stage: nn.Module) -> None:
        number = len(self._whole)
        self._whole[number] = []
        for module in list(stage.modules()):
            if isinstance(module, Block):
                self._shard(module)
                if self._compiled:
                    module.compile(backend="aot_eager")
                module.register_forward_hook(lambda module, _, output: self._look(number, module, output))
        self._shard(stage)

    def now(self) -> frozenset[int]:
        every = self._whole.items()
        return frozenset(n for n, held in every if any(t.untyped_storage().size() for t in held))

    def _look(self, number: int, module: nn.Module, output: Tensor) -> None:
        mine = self._whole[number]
        mine += [p for p in module.parameters() if not any(p is other for other in mine)]
        self.seen.append((number, self.now()))
        if output.requires_grad:
            output.register_hook(lambda _: self.seen.append((number, self.now())))


def train(rank: int, window: int | None, options: dict[str, Any]) -> Seen:
    """Two steps, then an evaluation."""
    mesh = mesh_of((2, 2), ("dp", "pp"))
    torch.manual_seed(0)
    model = Blocks(layers=options.pop("layers"), dropout=options.pop("dropout", 0.1))
    x, y = part(inputs(), mesh.get_local_rank("dp"), 2)
    gathered = Gathered(mesh["dp"], half=options.pop("half", False), compiled=options.pop("compiled", False))
    options = {"loss": squared_error, "seed": 3, "mesh": mesh, "parallelize": gathered.shard, **options}
    with penstock.pipeline(model, (x,), unshard_window=window, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            gathered.seen.clear()
            result = pipe.step(x, target=y, timeline=True)
            losses.append(result.loss)
            gradients = {name: whole(p.grad) for name, p in pipe.named_parameters() if p.grad is not None}
            optimizer.step()
        seen, left = list(gathered.seen), gathered.now()
        return Seen(
            losses,
            gradients,
            pipe.evaluate(x, target=y).loss,
            str(pipe.schedule),
            seen,
            left,
            result.timeline,
            pipe.deferred_weight_grad_fraction,
        )


Case = tuple[dict[str, Any], int]


def case(schedule: str, chunks: int, window: int, microbatches: int = 3, **more: Any) -> Case:
    usual = {"schedule": schedule, "stages_per_rank": chunks, "layers": 2 * chunks, "microbatches": microbatches}
    return {**usual, **more}, window


def same_bits(one: Seen, other: Seen) -> None:
    assert [float(loss) for loss in other.losses] == [float(loss) for loss in one.losses]
    assert other.gradients.keys() == one.gradients.keys()
    assert all(torch.equal(gradient, one.gradients[name]) for name, gradient in other.gradients.items())
    assert torch.equal(other.evaluated, one.evaluated)
    assert other.share == one.share


CASES = [
    case("zb-v", 2, 1, 4),
    case("interleaved-1f1b", 3, 2),
    case("dualpipe-v", 2, 2, 6),
    case("interleaved-1f1b", 3, 2, recompute=1),
    case("interleaved-1f1b", 3, 2, offload=True),
    case("zb-v", 2, 1, 4, half=True),
    case("interleaved-1f1b", 3, 2, compiled=True),
]


@pytest.mark.parametrize(("options", "window"), long_after(1, *CASES))
def test_a_window_changes_no_bit_and_bounds_what_is_gathered(
    ranks4: Ranks, options: dict[str, Any], window: int
) -> None:
    plain, windowed = (ranks4.run(train, size, options) for size in (None, window))
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
    options, window = CASES[1]
    seen = ranks4.run(train, window, options)[0]
    assert seen.timeline is not None
    row = list(seen.timeline.tracks[0].actions)
    ahead = row.index(Action(2, Op.UNSHARD))
    computing = [action for action in row[ahead:] if action.op.is_compute]
    assert [str(action) for action in computing[:2]] == ["0F2", "2F0"]
    assert seen.gathered[2:4] == [(0, frozenset({0})), (1, frozenset({1}))], "by the rank's own numbers: 0 and 2"
