"""The contestants: ways to run one step of a schedule, with the same weights in the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from common.ranks import CPU, RANKS, Step, Weights
from floor import Floor
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import penstock
from penstock.schedule import Op

MICROBATCHES = 16
ROWS = 4
DIM = 16


@dataclass(frozen=True)
class Case:
    """One schedule. `torch` is the class in torch that orders the work alike, if there is one."""

    schedule: str
    torch: str = ""
    chunks: int = 1


CASES = {
    case.schedule: case
    for case in (
        Case("naive"),
        Case("gpipe", "ScheduleGPipe"),
        Case("1f1b", "Schedule1F1B"),
        Case("interleaved-1f1b", "ScheduleInterleaved1F1B", chunks=2),
        Case("zb-h1", "ScheduleInterleavedZeroBubble"),
        Case("dualpipe-v", "ScheduleDualPipeV", chunks=2),
    )
}


class Block(nn.Module):
    """A stage: as little work as a stage with a residual connection can have."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class Contest:
    """The contestants of one schedule, by name: penstock, bare, floor and, where it has this schedule, torch."""

    def __init__(self, case: Case, rank: int) -> None:
        torch.manual_seed(0)
        stages = [Block() for _ in range(RANKS * case.chunks)]
        x, y = torch.randn(MICROBATCHES * ROWS, DIM), torch.randn(MICROBATCHES * ROWS, DIM)
        self.pipe = penstock.pipeline(
            stages, (x,), schedule=case.schedule, microbatches=MICROBATCHES, loss_fn=F.mse_loss, **_chunks(case)
        )
        placement = self.pipe.schedule.placement
        own = {index: stages[index] for index in placement.stages_on(rank)}
        self.weights = Weights(self.pipe, own.values())
        row = [action for action in self.pipe.schedule.rows[rank] if action.op.is_compute]
        calls = [(a.op, a.stage, a.microbatch) for a in row]
        self.steps: dict[str, Step] = {
            "penstock": lambda: self.pipe.step(x, target=y),
            "bare": _bare_step(own, calls, x, y, last=len(stages) - 1),
            "floor": Floor(own, placement.rank_of, calls, x.split(ROWS), y.split(ROWS)),
        }
        self.actions = dict.fromkeys(self.steps, len(row))
        if case.torch:
            self.steps["torch"], self.actions["torch"] = _torch_step(case, own, rank, x, y)

    def compare(self) -> None:
        """Raises unless all leave the same gradients: the floor to the bit; torch nearly, since it divides them at the
        end."""
        ours = self.weights.gradients(self.steps["penstock"])
        for name in ("floor", "torch") if "torch" in self.steps else ("floor",):
            rtol, atol = (0.0, 0.0) if name == "floor" else (1e-4, 1e-6)
            for mine, other in zip(ours, self.weights.gradients(self.steps[name]), strict=True):
                if mine is None or other is None or not torch.allclose(mine, other, rtol=rtol, atol=atol):
                    raise RuntimeError(f"Penstock and {name} leave different gradients")


@dataclass(frozen=True)
class OneProcess:
    """Penstock with both ranks in this process, where nothing waits, and the bare calls of all stages."""

    steps: dict[str, Step]
    weights: Weights
    actions: int


def one_process(case: Case) -> OneProcess:
    """A case's contestants in this process alone."""
    torch.manual_seed(0)
    stages = [Block() for _ in range(RANKS * case.chunks)]
    x, y = torch.randn(MICROBATCHES * ROWS, DIM), torch.randn(MICROBATCHES * ROWS, DIM)
    pipe = penstock.pipeline(
        stages,
        (x,),
        ranks=RANKS,
        schedule=case.schedule,
        microbatches=MICROBATCHES,
        loss_fn=F.mse_loss,
        **_chunks(case),
    )
    calls = [(a.op, a.stage, a.microbatch) for row in pipe.schedule.rows for a in row if a.op.is_compute]
    order = sorted(calls, key=lambda call: (call[2], call[0] is not Op.F))  # each forward before its backward

    bare = _bare_step(dict(enumerate(stages)), order, x, y, last=len(stages) - 1)
    return OneProcess({"penstock": lambda: pipe.step(x, target=y), "bare": bare}, Weights(pipe, stages), len(calls))


def _chunks(case: Case) -> dict[str, Any]:
    return {"stages_per_rank": case.chunks} if case.schedule.startswith("interleaved") else {}


def _bare_step(
    stages: dict[int, Block], row: Sequence[tuple[Op, int, Any]], x: Tensor, y: Tensor, *, last: int
) -> Step:
    """The calls of the stages in the order of this rank's row: what a step would be if a runtime took no time.

    Inputs and gradients lie ready, and nothing is sent. A split backward is a full one at I and nothing at W, so what
    splitting costs counts as the runtime's.
    """
    inputs, targets = [t.clone() for t in x.split(ROWS)], [t.clone() for t in y.split(ROWS)]
    gradient, seed = torch.randn(ROWS, DIM), torch.tensor(1 / MICROBATCHES)

    def step() -> None:
        roots: dict[tuple[int, int], Tensor] = {}
        for op, stage, microbatch in row:
            key = (stage, microbatch)
            if op is Op.F:
                given = inputs[microbatch]
                output = stages[stage](given.detach().requires_grad_() if stage else given)
                roots[key] = F.mse_loss(output, targets[microbatch]) if stage == last else output
            elif op is not Op.W:
                torch.autograd.backward(roots.pop(key), seed if stage == last else gradient)

    return step


def _torch_step(case: Case, own: dict[int, Block], rank: int, x: Tensor, y: Tensor) -> tuple[Step, int]:
    """Torch's schedule on the same stages, and the number of this rank's computations in it."""
    kind: Any = getattr(pipelining.schedules, case.torch)
    stages = [PipelineStage(module, index, RANKS * case.chunks, CPU) for index, module in own.items()]
    several = issubclass(kind, pipelining.schedules.PipelineScheduleMulti)
    made = kind(stages if several else stages[0], MICROBATCHES, loss_fn=F.mse_loss)
    count = 2 * MICROBATCHES
    if several:
        row = [action for action in made.pipeline_order[rank] if action is not None]
        count = sum(len(action.sub_actions) if action.sub_actions else 1 for action in row)
    first, last = 0 in own, RANKS * case.chunks - 1 in own

    def step() -> None:
        made.step(
            *((x,) if first else ()),
            **({"target": y, "losses": []} if last else {}),
            return_outputs=False,
        )

    return step, count
