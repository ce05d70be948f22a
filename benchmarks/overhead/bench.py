"""What the runtime adds to each action: Penstock and `torch.distributed.pipelining` beside the bare calls of stages.

The contestants take turns in the same processes. Stages are tiny, so that a step is mostly the runtime's own time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

import penstock
from penstock.launch.processes import launch
from penstock.runtime.execute.engine import Engine
from penstock.runtime.processes.world import join
from penstock.schedule import Op
from penstock.stages import Link

RANKS = 2
MICROBATCHES = 16
ROWS = 4
DIM = 16
WARMUP_STEPS = 12
MESSAGES = 2000
TARGET_MICROSECONDS = 40.0
CPU = torch.device("cpu")

Step = Callable[[], object]


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


# -- the contestants --------------------------------------------------------------------------------------------------


class Contest:
    """The ways to run one step of a schedule, with the same weights in the same memory."""

    def __init__(self, case: Case, rank: int) -> None:
        torch.manual_seed(0)
        stages = [Block() for _ in range(RANKS * case.chunks)]
        x, y = torch.randn(MICROBATCHES * ROWS, DIM), torch.randn(MICROBATCHES * ROWS, DIM)
        self.pipe = penstock.pipeline(
            stages, (x,), schedule=case.schedule, microbatches=MICROBATCHES, loss=F.mse_loss, **_chunks(case)
        )
        placement = self.pipe.schedule.placement
        own = {index: stages[index] for index in placement.stages_on(rank)}
        self.parameters = [parameter for stage in own.values() for parameter in stage.parameters()]
        if {id(p) for p in self.pipe.parameters()} != {id(p) for p in self.parameters}:
            raise RuntimeError(f"{case.schedule}: Penstock has other stages here than the others would: {list(own)}")
        row = [action for action in self.pipe.schedule.rows[rank] if action.op.is_compute]
        self.steps: dict[str, Step] = {
            "penstock": lambda: self.pipe.step(x, target=y),
            "bare": _bare_step(own, [(a.op, a.stage, a.microbatch) for a in row], x, y),
        }
        self.actions = {"penstock": len(row), "bare": len(row)}
        if case.torch:
            self.steps["torch"], self.actions["torch"] = _torch_step(case, own, rank, x, y)

    def zero(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def gradients(self, name: str) -> list[Tensor | None]:
        """What one step leaves in `.grad`."""
        self.zero()
        self.steps[name]()
        found = [parameter.grad for parameter in self.parameters]
        self.zero()
        return found


def _chunks(case: Case) -> dict[str, Any]:
    return {"chunks": case.chunks} if case.schedule.startswith("interleaved") else {}


def _bare_step(stages: dict[int, Block], row: Sequence[tuple[Op, int, Any]], x: Tensor, y: Tensor) -> Step:
    """The calls of the stages in the order of this rank's row: what a step would be if a runtime took no time.

    Inputs and gradients lie ready, and nothing is sent. A split backward is a full one at I and nothing at W, so what
    splitting costs counts as the runtime's.
    """
    last = len(stages) * RANKS - 1
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


# -- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Times:
    """What one step took on one rank, in microseconds."""

    wall: float
    thread: float
    """Of the processor, by the thread that calls `step`, which runs forwards and backwards too."""
    process: float
    """Of the processor, by all threads: gloo's too."""


def timed(step: Step) -> Times:
    """Runs a step and measures it."""
    clocks = (time.perf_counter_ns, time.thread_time_ns, time.process_time_ns)
    began = [clock() for clock in clocks]
    step()
    return Times(*((clock() - start) / 1000 for clock, start in zip(clocks, began, strict=True)))


def measure(contest: Contest, rounds: int) -> dict[str, list[list[Times]]]:
    """By contestant, each round's times on every rank."""
    orders = list(permutations(contest.steps))
    mine: dict[str, list[Times]] = {name: [] for name in contest.steps}
    for number in range(rounds):
        for name in orders[number % len(orders)]:
            contest.zero()
            dist.barrier()
            mine[name].append(timed(contest.steps[name]))
    of_ranks = _gathered(mine)
    return {name: [list(one) for one in zip(*(m[name] for m in of_ranks), strict=True)] for name in contest.steps}


def calls(step: Step) -> int:
    """How many functions, Python's and C's, the calling thread calls in a step."""
    found = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal found
        found += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        step()
    finally:
        sys.setprofile(None)
    return found


def compare(contest: Contest) -> None:
    """Raises unless Penstock and torch leave the same gradients."""
    if "torch" not in contest.steps:
        return
    ours, theirs = contest.gradients("penstock"), contest.gradients("torch")
    for mine, other in zip(ours, theirs, strict=True):
        if mine is None or other is None or not torch.allclose(mine, other, rtol=1e-4, atol=1e-6):
            raise RuntimeError("Penstock and torch leave different gradients")


def messages(rank: int) -> dict[str, dict[str, list[float]]]:
    """Microseconds of the processor that a message of one microbatch takes its sender's and its receiver's thread."""
    engine = Engine(join(None, None, "cpu"), [CPU] * RANKS, seed=0)
    transport = engine.transports[rank]
    channel = transport.channel(0, Link(0, 1, ((0, "a"),)), 0, 1, backward=False)
    value, into = torch.randn(ROWS, DIM), torch.empty(ROWS, DIM)
    begun: deque[list[dist.Work]] = deque()

    def ours() -> None:
        if rank == 0:
            channel.send(0, [value])
        else:
            channel.post(0)
            channel.receive(0)

    def torch_does() -> None:  # as its runtime: one batch a message; a sender waits at the step's end
        kind = dist.isend if rank == 0 else dist.irecv
        begun.append(dist.batch_isend_irecv([dist.P2POp(kind, value if rank == 0 else into, 1 - rank)]))
        if rank == 1 or len(begun) > MICROBATCHES:
            for work in begun.popleft():
                work.wait()

    ours()
    transport.end_step()
    found = {}
    for name, once in (("penstock", ours), ("torch", torch_does)):
        seconds: list[Times] = []
        for _ in range(MESSAGES // MICROBATCHES):
            dist.barrier()
            seconds.append(timed(partial(_times, once)))
        while begun:
            for work in begun.popleft():
                work.wait()
        found[name] = quartiles([one.thread / MICROBATCHES for one in seconds])
    dist.barrier()
    engine.close()
    both = _gathered(found)
    return {name: {"sender": both[0][name], "receiver": both[1][name]} for name in found}


def _times(once: Step) -> None:
    for _ in range(MICROBATCHES):
        once()


def _gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def quartiles(values: Sequence[float]) -> list[float]:
    """Least, lower quartile, median, upper quartile."""
    return [round(v, 2) for v in (min(values), *statistics.quantiles(values, n=4, method="inclusive"))]


# -- the two processes ------------------------------------------------------------------------------------------------


def run_rank(cases: Sequence[Case], rounds: int, folder: Path) -> None:
    """Runs in each of the two processes. Rank 0 writes what was measured to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found: dict[str, Any] = {"cases": []}
    for case in cases:
        contest = Contest(case, rank)
        for step in contest.steps.values():
            for _ in range(WARMUP_STEPS):
                contest.zero()
                step()
        compare(contest)
        counted = {}
        for name, step in contest.steps.items():
            dist.barrier()
            counted[name] = calls(step)
        gc.collect()
        gc.freeze()
        gc.disable()
        times = measure(contest, rounds)
        gc.enable()
        gc.unfreeze()
        of_ranks = _gathered((contest.actions, counted))
        found["cases"].append({**asdict(case), **summary(times, of_ranks)})
        contest.pipe.close()
    found["messages"] = messages(rank)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def summary(times: dict[str, list[list[Times]]], of_ranks: Sequence[Any]) -> dict[str, Any]:
    """Microseconds per action beyond the bare calls, of both ranks together: quartiles over rounds."""
    found: dict[str, Any] = {}

    def total(name: str, clock: str) -> list[float]:
        return [sum(getattr(one, clock) for one in ranks) for ranks in times[name]]

    counted = {name: sum(counts[name] for _, counts in of_ranks) for name in times}
    for name in times:
        actions = sum(counts[name] for counts, _ in of_ranks)
        one: dict[str, Any] = {"actions": actions, "calls_per_action": round(counted[name] / actions, 1)}
        for clock in ("thread", "process"):
            pairs = zip(total(name, clock), total("bare", clock), strict=True)
            one[f"{clock}_microseconds_per_action"] = quartiles([step / actions for step in total(name, clock)])
            if name != "bare":
                one[f"{clock}_microseconds_beyond_bare"] = quartiles([(a - b) / actions for a, b in pairs])
        if name != "bare":
            one["calls_beyond_bare"] = round((counted[name] - counted["bare"]) / actions, 1)
        slower = [max(r.wall for r in ranks) / 1000 for ranks in times[name]]
        found[name] = {**one, "step_milliseconds": quartiles(slower)}
    return found


# -- the report -------------------------------------------------------------------------------------------------------


def show(results: dict[str, Any], console: Console) -> None:
    """Prints the tables."""
    table = Table(title="microseconds of processor per action beyond the bare calls: median (lower quartile)")
    table.add_column("schedule")
    for column in ("Penstock", "torch", "Penstock, all threads", "torch, all threads"):
        table.add_column(column, justify="right")
    for column in ("bare, whole", "calls: Penstock", "torch", "step ms: Penstock", "torch", "bare"):
        table.add_column(column, justify="right")
    for case in results["cases"]:
        names = ("penstock", "torch")
        table.add_row(
            case["schedule"],
            *(_shown(case.get(name), f"{c}_microseconds_beyond_bare") for c in ("thread", "process") for name in names),
            _shown(case["bare"], "thread_microseconds_per_action"),
            *(str(case[name]["calls_beyond_bare"]) if isinstance(case[name], dict) else "" for name in names),
            *(_shown(case.get(name), "step_milliseconds") for name in ("penstock", "torch", "bare")),
        )
    console.print(table)
    for name, sides in results["messages"].items():
        text = ", ".join(f"{side} {us[2]:.1f} ({us[1]:.1f})" for side, us in sides.items())
        console.print(f"a message of {ROWS * DIM * 4} bytes, microseconds of the thread, {name}: {text}")
    for case in results["cases"]:
        found = case["penstock"]["thread_microseconds_beyond_bare"][2]
        reached = "reached    " if found <= TARGET_MICROSECONDS else "NOT reached"
        console.print(
            f"{reached}  {case['schedule']}: at most {TARGET_MICROSECONDS:.0f} ({found:.1f})", highlight=False
        )


def _shown(one: Any, key: str) -> str:
    return f"{one[key][2]:.1f} ({one[key][1]:.1f})" if isinstance(one, dict) else ""


def environment() -> dict[str, Any]:
    """The machine."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "penstock": penstock.__version__,
        "load_before": os.getloadavg()[0],
        "python_loop_milliseconds": _python_speed(),
    }


def _python_speed() -> float:
    """Milliseconds for a million turns of an empty loop, at best: how fast Python is here."""
    found = []
    for _ in range(9):
        began = time.thread_time_ns()
        for _ in range(1_000_000):
            pass
        found.append((time.thread_time_ns() - began) / 1e6)
    return round(min(found), 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--schedules", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=120, help="rounds of each schedule (default: 120)")
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)  # given to the two processes
    chosen = parser.parse_args()
    if chosen.rank_folder:
        run_rank([CASES[name] for name in chosen.schedules], chosen.rounds, chosen.rank_folder)
        return
    results: dict[str, Any] = {"environment": environment(), "rounds": chosen.rounds, "microbatches": MICROBATCHES}
    with tempfile.TemporaryDirectory() as folder:
        status = launch([__file__, *sys.argv[1:], "--rank-folder", folder], RANKS, threads=1)
        if status:
            sys.exit(status)
        results |= json.loads((Path(folder) / "found.json").read_text())
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if os.isatty(1) else 200))


if __name__ == "__main__":
    main()
