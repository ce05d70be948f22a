"""The rows of the table: each trap tried with `torch.distributed.pipelining`, as documented, and with Penstock.

A function runs on both of two gloo ranks, and returns what was found, in words, on one of them or on both.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B, SplitPoint
from torch.distributed.pipelining import pipeline as torch_pipeline
from torch.distributed.pipelining.schedules import (
    _Action,
    _ComputationType,
    _PipelineScheduleRuntime,
    _validate_schedule,
)
from torch.utils.checkpoint import checkpoint

import penstock
from penstock.schedule import Action, Op, Placement, Schedule, check, from_csv

WIDTH, ROWS, MICROBATCHES = 6, 8, 4
CPU = torch.device("cpu")
Found = str | None


class Row(NamedTuple):
    number: int
    trap: str
    right: str
    torch: Callable[[int], Found]
    penstock: Callable[[int], Found]


def layers(*extra: nn.Module) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), *extra), nn.Linear(WIDTH, WIDTH)]


def batch(rows: int = ROWS) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)


def in_torch(rank: int, modules: list[nn.Module], loss: Any = F.mse_loss, m: int = MICROBATCHES) -> Any:
    return Schedule1F1B(PipelineStage(modules[rank], rank, 2, CPU), m, loss_fn=loss)


def step(schedule: Any, rank: int, x: Any, y: Any) -> Any:
    return schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])


def in_penstock(modules: list[nn.Module], x: Any, loss: Any = F.mse_loss, m: int = MICROBATCHES, **options: Any) -> Any:
    return penstock.pipeline(modules, (x,), loss=loss, microbatches=m, **options)


def apart(mine: Tensor | None, right: Tensor | None) -> str:
    """The largest difference, as a share of the largest entry."""
    if mine is None or right is None:
        return "right" if mine is right else "no gradient"
    share = float((mine - right).abs().max() / right.abs().max())
    return "right" if share <= 1e-5 else f"wrong: off by {share:.2f} of the largest entry"


# -- 1: tied weights --------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(ids)))


def words() -> tuple[Tensor, Tensor, Tensor]:
    """Ids, targets, and the gradient of the tied weight."""
    torch.manual_seed(1)
    ids, target = torch.randint(11, (ROWS,)), torch.randint(11, (ROWS,))
    model = Tied()
    F.cross_entropy(model(ids), target).backward()
    assert model.embed.weight.grad is not None
    return ids, target, model.embed.weight.grad


def tied_torch(rank: int) -> Found:
    ids, target, right = words()
    model = Tied()
    stages: list[nn.Module] = [nn.Sequential(model.embed, model.body), model.head]
    step(in_torch(rank, stages, F.cross_entropy), rank, ids, target)
    return apart(model.embed.weight.grad, right)


def tied_penstock(rank: int) -> Found:
    ids, target, right = words()
    with penstock.pipeline(Tied(), (ids,), loss=F.cross_entropy, microbatches=MICROBATCHES) as pipe:
        pipe.step(ids, target=target)
        return apart(dict(pipe.named_parameters())["embed.weight"].grad, right)


# -- 2: accumulation, evaluation --------------------------------------------------------------------------------------


def _factor(twice: Tensor | None, once: Tensor | None) -> str:
    assert twice is not None
    assert once is not None
    return f"{float((twice * once).sum() / once.square().sum()):.2f} times one step's gradient"


def accumulated_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule, weight = in_torch(rank, modules), next(modules[rank].parameters())
    step(schedule, rank, x, y)
    once = weight.grad.clone()
    step(schedule, rank, x, y)
    return _factor(weight.grad, once)


def accumulated_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x) as pipe:
        weight = next(pipe.parameters())
        pipe.step(x, target=y)
        once = weight.grad.clone()
        pipe.step(x, target=y)
        return _factor(weight.grad, once)


def evaluated_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule, weight = in_torch(rank, modules), next(modules[rank].parameters())
    step(schedule, rank, x, y)
    once = weight.grad.clone()
    schedule.eval(x) if rank == 0 else schedule.eval(target=y)
    return _factor(weight.grad, once)


def evaluated_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x) as pipe:
        weight = next(pipe.parameters())
        pipe.step(x, target=y)
        once = weight.grad.clone()
        pipe.evaluate(x, target=y)
        return _factor(weight.grad, once)


# -- 3: means ---------------------------------------------------------------------------------------------------------


def _mean() -> list[nn.Module]:
    (x, y), modules = batch(), layers()
    F.mse_loss(nn.Sequential(*modules)(x), y).backward()
    return modules


def mean_torch(rank: int) -> Found:
    (x, y), modules, right = batch(), layers(), _mean()
    step(in_torch(rank, modules), rank, x, y)
    return apart(next(modules[rank].parameters()).grad, next(right[rank].parameters()).grad)


def mean_penstock(rank: int) -> Found:
    (x, y), right = batch(), _mean()
    with in_penstock(layers(), x) as pipe:
        pipe.step(x, target=y)
        return apart(next(pipe.parameters()).grad, next(right[rank].parameters()).grad)


# -- 4: batch norm ----------------------------------------------------------------------------------------------------


def normed_torch(rank: int) -> Found:
    norm = nn.BatchNorm1d(WIDTH)
    (x, y), modules = batch(), layers(norm)
    step(in_torch(rank, modules), rank, x, y)
    return f"{int(norm.num_batches_tracked)} batches counted" if rank == 0 else None


def normed_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(nn.BatchNorm1d(WIDTH)), x) as pipe:
        pipe.step(x, target=y)
        counts = [int(buffer) for name, buffer in pipe.named_buffers() if name.endswith("num_batches_tracked")]
        return f"{counts[0]} batches counted" if counts else None


# -- 5: a smaller batch later -----------------------------------------------------------------------------------------


def smaller_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    schedule = in_torch(rank, modules)
    step(schedule, rank, x, y)
    output = step(schedule, rank, x[:4], y[:4])
    return None if rank == 0 else f"outputs of {len(output)} rows for 4"


def smaller_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x) as pipe:
        pipe.step(x, target=y)
        result = pipe.step(x[:4], target=y[:4], outputs=True)
        return f"outputs of {sum(map(len, result.outputs))} rows for 4" if pipe.has_outputs else None


# -- 6: evaluation mode -----------------------------------------------------------------------------------------------


def dropped_torch(rank: int) -> Found:
    x, _ = batch()
    model = nn.Sequential(*layers(nn.Dropout(0.5)))
    traced = torch_pipeline(model, (x,), split_spec={"1": SplitPoint.BEGINNING})
    first = traced.get_stage_module(0)
    try:
        first.eval()
    except Exception as error:
        return f"eval() raises {type(error).__name__}"
    output = first(x)
    share = float(((output[0] if isinstance(output, tuple) else output) == 0).float().mean())
    return f"{share:.0%} of activations are dropped after eval()"


def dropped_penstock(rank: int) -> Found:
    x, y = batch()
    model = nn.Sequential(*layers(nn.Dropout(0.5)))
    plain = copy.deepcopy(model).eval()(x)
    with penstock.pipeline(model, (x,), loss=F.mse_loss, microbatches=1) as pipe:
        result = pipe.evaluate(x, target=y, outputs=True)
        return apart(result.outputs[0], plain) if pipe.has_outputs else None


# -- 7: order of losses -----------------------------------------------------------------------------------------------

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


# -- 9: illegal schedules ---------------------------------------------------------------------------------------------

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


# -- 10: receive buffers ----------------------------------------------------------------------------------------------


def buffered_torch(rank: int) -> Found:
    (x, y), modules = batch(16), layers()
    schedule = in_torch(rank, modules, m=16)
    step(schedule, rank, x, y)
    return None if rank == 0 else f"{len(schedule._stage.args_recv_info)} buffers kept for 16 microbatches"


def buffered_penstock(rank: int) -> Found:
    from penstock.schedule.communication import BUFFERS_PER_LINK

    return f"at most {BUFFERS_PER_LINK} receives posted for 16 microbatches"


# -- 11: a rank raises ------------------------------------------------------------------------------------------------


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
            time.sleep(12)  # as a rank that cleans up, or whose launcher is on another machine
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
    """Not while it is recorded."""

    def forward(self, x: Tensor) -> Tensor:
        if type(x).__name__ != "FakeTensor":
            raise ValueError("as it happens")
        return x


# -- 12: numbers that do not fit --------------------------------------------------------------------------------------


def few_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    step(in_torch(rank, modules, m=1), rank, x, y)
    return "runs"


def few_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x, m=1) as pipe:
        pipe.step(x, target=y)
    return "runs"


def uneven_torch(rank: int) -> Found:
    (x, y), modules = batch(7), layers()
    whole = layers()
    F.mse_loss(nn.Sequential(*whole)(x), y).backward()
    step(in_torch(rank, modules), rank, x, y)
    return apart(next(modules[rank].parameters()).grad, next(whole[rank].parameters()).grad)


def uneven_penstock(rank: int) -> Found:
    (x, y), whole = batch(7), layers()
    F.mse_loss(nn.Sequential(*whole)(x), y).backward()
    with in_penstock(layers(), x) as pipe:
        pipe.step(x, target=y)
        return apart(next(pipe.parameters()).grad, next(whole[rank].parameters()).grad)


# -- 13: skips --------------------------------------------------------------------------------------------------------


class Skips(nn.Module):
    """Its first layer's output is used by the second and by the fourth, each in a stage of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c, self.d = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        first = self.a(x)
        return self.d(self.c(self.b(first)) + first)


def _skipped_right() -> Tensor | None:
    (x, y), model = batch(), Skips()
    F.mse_loss(model(x), y).backward()
    return model.a.weight.grad


def skipped_torch(rank: int) -> Found:
    (x, y), model = batch(), Skips()
    cuts = dict.fromkeys("bcd", SplitPoint.BEGINNING)
    traced = torch_pipeline(model, (x[: ROWS // MICROBATCHES],), split_spec=cuts)
    stages = [traced.build_stage(index, CPU) for index in (rank, rank + 2)]
    step(ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss), rank, x, y)
    return apart(stages[0].submod.get_parameter("a.weight").grad, _skipped_right()) if rank == 0 else None


def skipped_penstock(rank: int) -> Found:
    x, y = batch()
    options = {"schedule": "interleaved-1f1b", "chunks": 2, "cuts": ["b", "c", "d"]}
    with penstock.pipeline(Skips(), (x,), loss=F.mse_loss, microbatches=MICROBATCHES, **options) as pipe:
        pipe.step(x, target=y)
        held = dict(pipe.named_parameters())
        return apart(held["a.weight"].grad, _skipped_right()) if "a.weight" in held else None


# -- 14: structures ---------------------------------------------------------------------------------------------------


def dict_loss(output: Tensor, target: dict[str, Tensor]) -> Tensor:
    return F.mse_loss(output, target["y"])


def structured_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    step(in_torch(rank, modules, dict_loss), rank, x, {"y": y})
    return None if rank == 0 else "runs"


def structured_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(), x, dict_loss) as pipe:
        pipe.step(x, target={"y": y})
    return None if rank == 0 else "runs"


# -- 18: updates in place ---------------------------------------------------------------------------------------------


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


def in_place_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[1] = nn.Sequential(Doubles(), modules[1])
    step(in_torch(rank, modules), rank, x, y)
    return None if rank == 0 else "runs"


def in_place_penstock(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[1] = nn.Sequential(Doubles(), modules[1])
    with in_penstock(modules, x) as pipe:
        pipe.step(x, target=y)
    return None if rank == 0 else "runs"


# -- 19: recomputation ------------------------------------------------------------------------------------------------


class Recomputed(nn.Module):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.last = norm, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.norm, x, use_reentrant=False))


def recomputed_torch(rank: int) -> Found:
    norm = nn.BatchNorm1d(WIDTH)
    (x, y), modules = batch(), [Recomputed(norm), layers()[1]]
    step(in_torch(rank, modules), rank, x, y)
    return f"{int(norm.num_batches_tracked)} batches counted" if rank == 0 else None


def recomputed_penstock(rank: int) -> Found:
    x, y = batch()
    with in_penstock(layers(nn.BatchNorm1d(WIDTH)), x, recompute="always") as pipe:
        pipe.step(x, target=y)
        counts = [int(buffer) for name, buffer in pipe.named_buffers() if name.endswith("num_batches_tracked")]
        return f"{counts[0]} batches counted" if counts else None


# -- 21: masked targets -----------------------------------------------------------------------------------------------


def masked() -> tuple[Tensor, Tensor, list[nn.Module]]:
    x, _ = batch()
    target = torch.tensor([1, 2, 3, -100, 4, -100, 5, 0])
    whole = layers()
    F.cross_entropy(nn.Sequential(*whole)(x), target).backward()
    return x, target, whole


def masked_torch(rank: int) -> Found:
    x, target, whole = masked()
    modules = layers()
    step(in_torch(rank, modules, F.cross_entropy), rank, x, target)
    return apart(next(modules[rank].parameters()).grad, next(whole[rank].parameters()).grad)


def masked_penstock(rank: int) -> Found:
    x, target, whole = masked()
    with in_penstock(layers(), x, F.cross_entropy, reduction=lambda t: (t != -100).sum()) as pipe:
        pipe.step(x, target=target)
        return apart(next(pipe.parameters()).grad, next(whole[rank].parameters()).grad)


# -- 22: frozen stages ------------------------------------------------------------------------------------------------


def frozen_torch(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[0].requires_grad_(False)
    step(in_torch(rank, modules), rank, x, y)
    return None if rank == 0 else "runs"


def frozen_penstock(rank: int) -> Found:
    (x, y), modules = batch(), layers()
    modules[0].requires_grad_(False)
    with in_penstock(modules, x) as pipe:
        pipe.step(x, target=y)
    return None if rank == 0 else "runs"


def bare_torch(rank: int) -> Found:
    modules = [nn.Tanh(), layers()[1]]
    torch.optim.AdamW(modules[rank].parameters()) if rank == 0 else None
    return "runs"


def bare_penstock(rank: int) -> Found:
    x, _ = batch()
    with in_penstock([nn.Tanh(), layers()[1]], x) as pipe:
        torch.optim.AdamW(pipe.parameters())
    return "runs"


TABLE = {
    "tied": Row(1, "the gradient of a tied weight", "right", tied_torch, tied_penstock),
    "accumulated": Row(2, "two steps without zero_grad", "2.00 times", accumulated_torch, accumulated_penstock),
    "evaluated": Row(2, "an evaluation after a step", "1.00 times", evaluated_torch, evaluated_penstock),
    "mean": Row(3, "a loss that is a mean", "right", mean_torch, mean_penstock),
    "normed": Row(4, "batch norm, one step of 4 microbatches", "4 batches counted", normed_torch, normed_penstock),
    "smaller": Row(5, "8 rows, then 4", "4 rows", smaller_torch, smaller_penstock),
    "dropped": Row(6, "eval() of a traced model with dropout", "right", dropped_torch, dropped_penstock),
    "ordered": Row(
        7, "losses, where microbatch 1 runs first", "in order of microbatch", ordered_torch, ordered_penstock
    ),
    "validated": Row(9, "illegal schedules", "both refused", validated_torch, validated_penstock),
    "buffered": Row(10, "receive buffers of a stage", "2", buffered_torch, buffered_penstock),
    "raised": Row(11, "a rank raises, and its process lives on", "told at once", raised_torch, raised_penstock),
    "few": Row(12, "fewer microbatches than ranks", "runs", few_torch, few_penstock),
    "uneven": Row(12, "7 rows in 4 microbatches", "right", uneven_torch, uneven_penstock),
    "skipped": Row(13, "a value that is used two stages later", "right", skipped_torch, skipped_penstock),
    "structured": Row(14, "a dict as the target", "runs", structured_torch, structured_penstock),
    "in_place": Row(18, "an update in place of what was received", "runs", in_place_torch, in_place_penstock),
    "recomputed": Row(
        19, "batch norm that is run again in backward", "4 batches counted", recomputed_torch, recomputed_penstock
    ),
    "masked": Row(21, "targets with ignore_index", "right", masked_torch, masked_penstock),
    "frozen": Row(22, "a frozen first stage", "runs", frozen_torch, frozen_penstock),
    "bare": Row(22, "an optimizer for a rank without parameters", "runs", bare_torch, bare_penstock),
}


def leave() -> None:
    dist.destroy_process_group()
