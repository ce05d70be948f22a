"""What ranks do under NCCL's rules: each step of a few is compared with one device, the first one as well."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import jobs
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.distributed.groups import Groups
from penstock.runtime.execute.clock import StreamClock
from penstock.runtime.transport.distributed import DistributedTransport, ReceiveOrder
from penstock.testing import nccl
from penstock.testing.nccl import nccl_rules
from scaffolding.by_hand import step_by_hand
from scaffolding.compared import differences, impossible_messages
from scaffolding.models import squared_error

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
        return steps(cell)


MESHES: dict[str, list[list[int]]] = {"two pipelines": [[0, 1], [2, 3]], "a part": [[1, 2, 3]]}
"""The ranks of each pipeline, of four."""


def train_over(rank: int, mesh: str, cell: Cell) -> list[str]:
    """The same over a mesh. Replicas get the same data, so their average is what each of them has."""
    grid = DeviceMesh("cpu", MESHES[mesh], mesh_dim_names=("dp", "pp"))
    with nccl_rules(eager=cell.eager):
        return steps(cell, mesh=grid) if any(rank in line for line in MESHES[mesh]) else []


def groups_of_two(rank: int, cell: Cell) -> int:
    """How many groups this rank made for ways. None has a device, and the default group still has its own."""
    made: list[dist.ProcessGroup] = []

    def one_of(self: Groups, parts: Any, backend: str) -> dist.ProcessGroup:
        made.append(make(self, parts, backend))
        return made[-1]

    make = Groups._create_own
    with nccl_rules(eager=cell.eager):
        device = dist.group.WORLD.bound_device_id
        with mock.patch.object(Groups, "_create_own", one_of):
            steps(cell)
        assert dist.group.WORLD.bound_device_id == device
    assert all(group.bound_device_id is None for group in made)
    return sum(group.size() == 2 for group in made)


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


def with_bug(rank: int, cell: Cell, bug: str) -> list[str]:
    """The same, with a bug."""
    with BUGS[bug]():
        return train(rank, cell)


def post_when_it_can_start(way: ReceiveOrder, receiver: Any, microbatch: int) -> None:
    if receiver.can_start:
        receiver.start(microbatch)


def start_when_needed(way: ReceiveOrder, receiver: Any, microbatch: int) -> None:
    if not receiver.has_started(microbatch):
        receiver.start(microbatch)


def mark_and_synchronize(clock: StreamClock, mark: Any = StreamClock.mark) -> Any:
    torch.cuda.synchronize()
    return mark(clock)


BUGS: dict[str, Callable[[], Any]] = {
    "receives in the order of use": partial(
        mock.patch.multiple, ReceiveOrder, post=post_when_it_can_start, start_until=start_when_needed
    ),
    "pairs meet at their first message": partial(mock.patch.object, DistributedTransport, "connect", return_value=None),
    "all pairs share two groups": partial(mock.patch.object, Groups, "pair", return_value=None),
    "timed by synchronizing": partial(mock.patch.object, StreamClock, "mark", mark_and_synchronize),
}


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


RULES = {
    f.__name__: f
    for f in (
        tags_are_ignored, the_first_operation_meets_its_peer, what_waits_holds_up_what_is_behind_it,
        to_synchronize_waits_for_posted_receives, sizes_must_match, some_dtypes_are_refused,
    )
}  # fmt: skip


def assert_rule(rank: int, rule: str) -> None:
    """That one of them holds: each asserts it itself."""
    with nccl_rules():
        RULES[rule](rank)


def assert_one_communicator_for_all(rank: int) -> None:
    """With `device_id=`: what rank 0 awaits of rank 1 holds up what it sends to rank 2."""
    with nccl_rules(eager=True):
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


def conform(rank: int) -> list[str]:
    """The conformance checks."""
    with nccl_rules():
        return jobs.conform(rank, "distributed")[1]
