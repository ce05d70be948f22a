"""Under NCCL's rules, imposed on gloo: every schedule, with skips and ties, from the first step on.

Each cell runs under the rules without `device_id=` and under those with it (`eager`).
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple
from unittest import mock

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock._base.errors import ArgumentError
from penstock.distributed.groups import Groups
from penstock.runtime.transport.distributed import ReceiveOrder
from penstock.schedule import schedule_spec, schedule_specs
from penstock.schedule.generators import ScheduleParams
from penstock.testing import nccl
from penstock.testing.nccl import nccl_rules
from scaffolding.by_hand import step_by_hand
from scaffolding.compared import differences, impossible_messages
from scaffolding.models import squared_error
from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


WIDTH = 5
MICROBATCHES = 4
KINDS_OF_BATCH = (12, 8)
"""Rows: microbatches of three, and then of two."""


class Block(nn.Module):
    """Two values: one for the next block, and one that a later block may take."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x).tanh(), self.side(x)


class Blocks(nn.Module):
    """As many blocks as stages. `reach`: how many blocks later the second value is used; 0: nowhere."""

    def __init__(self, blocks: int, reach: int = 0, *, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.reach = min(reach, blocks - 1)
        if tied:
            self.blocks[-1].main.weight = self.blocks[0].main.weight  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        sides: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x, side = block(x)
            sides.append(side)
            if self.reach and index >= self.reach:
                x = x * sides[index - self.reach]
        return x


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "chain": Blocks,
    "a skip over one cut": lambda stages: Blocks(stages, 2),
    "a skip over two cuts": lambda stages: Blocks(stages, 3),
    "a tie": lambda stages: Blocks(stages, tied=True),
}
"""The second value passes by one stage, or two, before it is used."""


class Cell(NamedTuple):
    """One cell of the matrix. `timed`: which kinds of batch are run with a timeline."""

    schedule: str
    model: str
    stages: int
    chunks: int
    timed: tuple[bool, bool]
    transport: str = "distributed"
    eager: bool = False
    lazy_loading: bool = False
    """A kernel that runs for the first time waits for receives that were posted ahead."""


def train(rank: int, cell: Cell) -> list[str]:
    """What differs from one device, in words: three steps with one kind of batch, and two with another."""
    with nccl_rules(eager=cell.eager, lazy_loading=cell.lazy_loading):
        device = dist.group.WORLD.bound_device_id
        found = steps(cell)
        assert dist.group.WORLD.bound_device_id == device
        return found


MESHES: dict[str, list[list[int]]] = {"two pipelines": [[0, 1], [2, 3]], "a part": [[1, 2, 3]]}
"""The ranks of each pipeline, of four."""


def train_over(rank: int, mesh: str, cell: Cell) -> list[str]:
    """The same over a mesh. Replicas get the same data, so their average is what each of them has."""
    grid = DeviceMesh("cpu", MESHES[mesh], mesh_dim_names=("dp", "pp"))
    with nccl_rules(eager=cell.eager):
        return steps(cell, mesh=grid) if any(rank in line for line in MESHES[mesh]) else []


def steps(cell: Cell, **options: Any) -> list[str]:
    torch.manual_seed(0)
    model = MODELS[cell.model](cell.stages)
    reference = copy.deepcopy(model)
    options |= {"schedule": cell.schedule, "stages_per_rank": cell.chunks, "transport": cell.transport}
    example = torch.randn(KINDS_OF_BATCH[0], WIDTH)
    found = []
    with penstock.pipeline(model, (example,), loss=squared_error, microbatches=MICROBATCHES, **options) as pipe:
        for rows, count, timed in zip(KINDS_OF_BATCH, (3, 2), cell.timed, strict=True):
            for step in range(count):
                x, y = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
                model.zero_grad()
                reference.zero_grad()
                result = pipe.step(x, target=y, timeline=timed)
                assert (result.timeline is not None) is timed
                if timed and result.timeline is not None:
                    assert result.timeline.makespan_seconds > 0
                    if cell.transport == "distributed":
                        found += impossible_messages(result.timeline)
                expected = step_by_hand(reference, [x], y, squared_error, MICROBATCHES).total
                found += [
                    f"{rows} rows, step {step}: {what}" for what in differences(pipe, reference, expected, result)
                ]
    return found


def receives_in_the_order_of_use() -> Any:
    """While layouts are learned, a receive starts when it is needed."""

    def post(order: ReceiveOrder, receiver: Any, microbatch: int) -> None:
        if receiver.can_start:
            receiver.start(microbatch)

    def start_until(order: ReceiveOrder, receiver: Any, microbatch: int) -> None:
        if not receiver.has_started(microbatch):
            receiver.start(microbatch)

    return mock.patch.multiple(ReceiveOrder, post=post, start_until=start_until)


def no_group_of_two() -> Any:
    """All pairs of ranks share two groups."""
    return mock.patch.object(Groups, "pair", return_value=None)


BUGS = [
    (receives_in_the_order_of_use, Cell("interleaved-1f1b", "a skip over two cuts", 4, 2, (False, False))),
    (no_group_of_two, Cell("1f1b", "a skip over two cuts", 4, 1, (False, False), eager=True)),
]
"""With a cell that does not survive the bug."""


def train_with_bug(rank: int, cell: Cell, bug: Callable[[], Any]) -> list[str]:
    with bug():
        return train(rank, cell)


# -- the rules by themselves ------------------------------------------------------------------------------------------


def tags_are_ignored(rank: int) -> None:
    first, second = torch.zeros(2), torch.zeros(2)
    if rank == 0:
        works = [dist.isend(torch.full((2,), float(k)), 1, tag=k) for k in (1, 2)]
    else:
        works = [dist.irecv(first, 0, tag=2), dist.irecv(second, 0, tag=1)]
    for work in works:
        assert work is not None
        work.wait()
    assert rank == 0 or (first.tolist(), second.tolist()) == ([1.0, 1.0], [2.0, 2.0])


def the_first_operation_meets_its_peer(rank: int) -> None:
    dist.barrier()
    began = time.monotonic()
    if rank == 1:
        time.sleep(0.3)
    work = (dist.isend if rank == 0 else dist.irecv)(torch.zeros(1), 1 - rank)
    assert time.monotonic() - began >= 0.25
    assert work is not None
    work.wait()


def what_waits_holds_up_what_is_behind_it(rank: int) -> None:
    """Rank 0 posts a receive, and then sends; rank 1 wants to receive before it sends."""
    if rank == 0:
        works = [dist.irecv(torch.zeros(1), 1), dist.isend(torch.ones(1), 1)]
    else:
        works = [dist.irecv(torch.zeros(1), 0)]
        time.sleep(0.2)
        assert works[0] is not None
        assert not works[0].is_completed()
    dist.barrier()
    # Both communicators now begin with a receive: NCCL would hang. So the test makes room, past the rules.
    with mock.patch.object(nccl.SerialWorker, "issue", lambda _, run, __: threading.Thread(target=run).start()):
        if rank == 1:
            dist.isend(torch.ones(1), 0)
    for work in works:
        assert work is not None
        work.wait()


def to_synchronize_waits_for_posted_receives(rank: int) -> None:
    first = (dist.isend if rank == 0 else dist.irecv)(torch.zeros(1), 1 - rank)
    assert first is not None
    first.wait()
    if rank == 0:
        dist.irecv(torch.zeros(1), 1)
        waiting = threading.Thread(target=torch.cuda.synchronize)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        dist.barrier()
        waiting.join()
    else:
        dist.barrier()
        dist.isend(torch.zeros(1), 0)


def sizes_must_match(rank: int) -> None:
    if rank == 0:
        dist.isend(torch.zeros(3), 1)
    else:
        work = dist.irecv(torch.zeros(2), 0)
        assert work is not None
        with pytest.raises(RuntimeError, match="a receive of 8 bytes met a send of 12 bytes"):
            work.wait()


def some_dtypes_are_refused(rank: int) -> None:
    for dtype in (torch.int16, torch.uint16, torch.uint32, torch.uint64):
        with pytest.raises(TypeError, match="not supported for NCCL process group"):
            dist.isend(torch.zeros(1, dtype=dtype), 1 - rank)


RULES = [
    *(tags_are_ignored, the_first_operation_meets_its_peer, what_waits_holds_up_what_is_behind_it),
    *(to_synchronize_waits_for_posted_receives, sizes_must_match, some_dtypes_are_refused),
]


def assert_rule(rank: int, rule: Callable[[int], None]) -> None:
    """That one of them holds: each asserts it itself."""
    with nccl_rules():
        rule(rank)


def assert_one_communicator_for_all(rank: int) -> None:
    """With `device_id=`: what rank 0 awaits of rank 1 holds up what it sends to rank 2."""
    with nccl_rules(eager=True):
        with pytest.raises(RuntimeError, match="would wait forever: the default group has a device"):
            dist.new_group([0, 1], use_local_synchronization=True)
        works: list[Any] = []
        if rank == 0:
            works = [dist.irecv(torch.zeros(1), 1), dist.isend(torch.zeros(1), 2)]
        elif rank == 2:
            works = [dist.irecv(torch.zeros(1), 0)]
            time.sleep(0.2)
            assert not works[0].is_completed()
        dist.barrier()
        if rank == 1:
            works = [dist.isend(torch.zeros(1), 0)]
        for work in works:
            work.wait()


def conform_under_rules(rank: int) -> list[str]:
    """The conformance checks."""
    with nccl_rules():
        return jobs.conform(rank, "distributed")[1]


# -- what they show ----------------------------------------------------------------------------------------------------

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
        assert ranks.run(train, cell, seconds=SECONDS) == [[]] * p, cell


@pytest.mark.parametrize("eager", long_after(1, True, False))
def test_layouts_are_learned_under_the_rules_beside_shared_memory(ranks4: Ranks, eager: bool) -> None:
    cell = Cell("interleaved-1f1b", "a skip over two cuts", 8, 2, (False, True), "auto", eager)
    assert ranks4.run(train, cell, seconds=SECONDS) == [[]] * 4


@pytest.mark.parametrize("schedule", long_after(1, "dualpipe", "chimera"))
def test_the_second_step_needs_no_kernel_that_the_first_has_not_loaded(ranks4: Ranks, schedule: str) -> None:
    """Ranks 1 and 2 each await the other's first gradient when they compute their own. On an H100 both hung."""
    cell = Cell(schedule, "a skip over two cuts", 4, 1, (False, False), lazy_loading=True)
    assert ranks4.run(train, cell, seconds=SECONDS) == [[]] * 4


@pytest.mark.parametrize("mesh", MESHES)
def test_replicas_and_a_part_of_the_job_where_the_default_group_has_a_device(ranks4: Ranks, mesh: str) -> None:
    ranks = len(MESHES[mesh][-1])  # of a pipeline
    cell = Cell("interleaved-1f1b", "a skip over one cut", 2 * ranks, 2, (False, True), eager=True)
    assert ranks4.run(train_over, mesh, cell, seconds=SECONDS) == [[]] * 4


@pytest.mark.long
@pytest.mark.parametrize(("bug", "cell"), BUGS)
def test_a_bug_is_caught(bug: Callable[[], Any], cell: Cell, request: pytest.FixtureRequest) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{cell.stages // cell.chunks}")
    assert ranks.run(train, cell, seconds=SECONDS) == [[]] * ranks.n
    try:
        assert any(ranks.run(train_with_bug, cell, bug, seconds=15.0))
    except RanksError:
        """It hung, or raised."""


@pytest.mark.parametrize("rule", RULES)
def test_the_rules_are_kept(ranks2: Ranks, rule: Callable[[int], None]) -> None:
    ranks2.run(assert_rule, rule, seconds=SECONDS)


def test_the_rules_with_a_device_id(ranks3: Ranks) -> None:
    ranks3.run(assert_one_communicator_for_all, seconds=SECONDS)


def test_conformance(ranks2: Ranks) -> None:
    assert ranks2.run(conform_under_rules, seconds=SECONDS) == [jobs.SCRIPTS] * 2


def test_eager_rules_need_the_default_group() -> None:
    assert not dist.is_initialized()
    with (
        pytest.raises(ArgumentError, match=r"call torch.distributed.init_process_group before"),
        nccl_rules(eager=True),
    ):
        pass
