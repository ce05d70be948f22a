"""Schedules: their order, their legality, what they buffer, and what happens when a rank raises."""

from __future__ import annotations

import tempfile
import time

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    _validate_schedule,
)

from penstock.schedule import Action, Op, Placement, Schedule, check, from_csv
from rows.common import CPU, Found, batch, in_penstock, in_torch, layers, step

REVERSED = "0F1,0F0,0B1,0B0\n1F1,1F0,1B1,1B0\n"


def _order(losses: list[float], right: list[float]) -> str:
    if losses == right:
        return "in order of microbatch"
    return "in order of execution" if losses == right[::-1] else f"{len(losses)} losses, in no order"


def _losses() -> list[float]:
    (x, y), modules = batch(), layers()
    return [float(F.mse_loss(modules[1](modules[0](a)), b)) for a, b in zip(x.chunk(2), y.chunk(2), strict=True)]


def ordered_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule = _PipelineScheduleRuntime([PipelineStage(modules[rank], rank, 2, CPU)], 2, loss_fn=F.mse_loss)
    with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        file.write(REVERSED)
        file.flush()
        schedule._load_csv(file.name, "compute_only")
    losses: list[Tensor] = []
    _ = schedule.step(x) if rank == 0 else schedule.step(target=y, losses=losses)
    return None if rank == 0 else _order([float(loss) for loss in losses], _losses())


def ordered_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x, m=2, schedule=from_csv(REVERSED, name="reversed")) as pipe:
        result = pipe.step(x, target=y)
        return _order([float(loss) for loss in result.losses], _losses()) if pipe.has_outputs else None


REPEATED = ((("F", 0), ("F", 1), ("B", 0), ("B", 1), ("B", 1)), (("F", 0), ("B", 0), ("F", 1), ("B", 1)))


CROSSED = ((("F", 0), ("B", 0), ("F", 1), ("B", 1)), (("F", 0), ("F", 1), ("B", 0), ("B", 1)))


def validated_torch(rank: int) -> Found:
    kinds = {"F": _ComputationType.FORWARD, "B": _ComputationType.FULL_BACKWARD}
    said = []
    for name, rows in {"repeated": REPEATED, "deadlock": CROSSED}.items():
        actions = {r: [_Action(r, kinds[op], k) for op, k in row] for r, row in enumerate(rows)}
        try:
            _validate_schedule(actions, 2, 2, 2)
            said.append(f"{name}: accepted")
        except AssertionError:
            said.append(f"{name}: refused")
    return ", ".join(said)


def validated_penstock(rank: int) -> Found:
    said = []
    for name, rows in {"repeated": REPEATED, "deadlock": CROSSED}.items():
        made = [[Action(r, Op(op), k) for op, k in row] for r, row in enumerate(rows)]
        wrong = [v for v in check(Schedule(name, Placement.loop(2), 2, made)) if v.fatal]
        said.append(f"{name}: {'refused' if wrong else 'accepted'}")
    return ", ".join(said)


def buffered_torch(rank: int) -> Found:
    (x, y), modules = batch(16), layers()
    schedule = in_torch(rank, modules, m=16)
    step(schedule, rank, x, y)
    return None if rank == 0 else f"{len(schedule._stage.args_recv_info)} buffers kept for 16 microbatches"


def buffered_penstock(rank: int) -> Found:
    from penstock.schedule.communication import BUFFERS_PER_LINK

    return f"at most {BUFFERS_PER_LINK} receives posted for 16 microbatches"


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("as it happens")


def raised_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    began = time.monotonic()
    if rank == 0:
        modules[0] = nn.Sequential(modules[0], Raises())
    try:
        step(in_torch(rank, modules), rank, x, y)
    except Exception as error:
        if rank == 0:
            time.sleep(12)  # like a rank that cleans up, or whose launcher is on another machine
            return None
        return f"the other rank waits {time.monotonic() - began:.0f} s, then {type(error).__name__}"
    return None


def raised_penstock(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    began = time.monotonic()
    modules[0] = nn.Sequential(modules[0], _RaisesLater())
    try:
        with in_penstock(modules, x) as pipe:
            pipe.step(x, target=y)
    except Exception as error:
        if rank == 0:
            time.sleep(12)
            return None
        return f"the other rank waits {time.monotonic() - began:.0f} s, then {type(error).__name__}"
    return None


class _RaisesLater(nn.Module):
    """Raises in a step, but not while it is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x).__name__ != "FakeTensor":
            raise ValueError("as it happens")
        return x
