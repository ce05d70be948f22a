"""Penstock over NCCL: two, three and four ranks share the GPU, and torchrun starts them.

They show order, results and what hangs, never speed. Models are tiny, since ranks take turns on the device; but NCCL
buffers what is small, so an order that hangs only if a send waits for its receive needs the large messages.
"""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from cases import failures, nccl, synchronizations
from cases.case import Case, Found, Setting, World
from cases.features import around_a_checkpoint, as_expected
from cases.models import MODELS, WIDE_BYTES, Skips, gpt
from cases.nccl import GATE, PART
from cases.verification import MICROBATCHES, PRECISE, make_repeatable, prove
from penstock.schedule import names, schedule_spec
from penstock.schedule.generators import ScheduleParams
from scaffolding.by_hand import step_by_hand
from scaffolding.compared import NEAR, differences, impossible_messages

SECONDS = 40.0
"""For a case: on an H100 the longest took ten."""

WORLDS = {2: World(2, "own"), 4: World(4, "both"), 3: World(3, "device_id")}
"""The most telling first. NCCL makes a communicator for each pair of ranks, or with a device one for each group."""

ONLY_NCCL = World(2, "nccl")
MODEL = {2: "gpt", 3: "mlp", 4: "skips"}
"""Two ranks: a tie and dropout; four: values that skip two cuts, and a tie."""

LARGE = {2: ("1f1b", "zb-h1"), 3: (), 4: ("interleaved-1f1b", "dualpipe")}
"""With messages that do not fit into NCCL's buffers (4 MiB)."""

WIDTH = 9


def cases() -> Iterator[Case]:
    for ranks, world in WORLDS.items():
        yield _case(f"{ranks}/nccl by itself", world, exchanges)
        first, *rest = _schedules(ranks)
        yield _proof(f"{ranks}/verify/{first}", world, MODEL[ranks], "float32", first)
        for schedule in LARGE[ranks]:
            yield _case(f"{ranks}/messages of 16 MiB/{schedule}", world, partial(large_messages, schedule))
        yield _case(f"{ranks}/steps of two shapes/1f1b", world, partial(steps, "1f1b"))
        for schedule in rest:
            yield _proof(f"{ranks}/verify/{schedule}", world, MODEL[ranks], "float32", schedule)
        yield from {2: _of_two, 3: _of_three, 4: _of_four}[ranks](world)
    yield from failures.cases_over_nccl()
    yield Case("ranks/penstock verify --ranks 2", PART, command_line, requires=GATE)
    yield _proof("2 with NCCL only/verify/1f1b", ONLY_NCCL, "skips", "float32", "1f1b")


def _of_two(world: World) -> Iterator[Case]:
    for name, precision, schedule in PRECISE:
        yield _proof(f"2/verify/{precision}/{schedule}", world, name, precision, schedule)
    yield _case("2/accumulation", world, partial(accumulation, "zb-h1"))
    yield _case("2/evaluate and predict", world, partial(evaluation, "1f1b"))
    yield _case("2/clip_grad_norm_", world, partial(clipping, "1f1b"))
    yield _case("2/waits/1f1b", world, waiting)
    yield _proof("2/verify/transport='auto'", world, "skips", "float32", "1f1b", transport="auto")
    yield _proof("2/verify/recompute", world, "gpt", "float32", "1f1b", recompute="always")
    yield _proof("2/verify/offload", world, "gpt", "float32", "gpipe", offload=True)
    yield _proof("2/verify/batch norm", world, "convnet", "float32", "1f1b")
    yield _case("2/verify/llama", world, partial(proof, "llama", "float32", "zb-h1"))
    yield _case("2/steps of two shapes/zb-v", world, partial(steps, "zb-v"))


def _of_three(world: World) -> Iterator[Case]:
    yield _case("3/steps of two shapes/interleaved-1f1b", world, partial(steps, "interleaved-1f1b"))


def _of_four(world: World) -> Iterator[Case]:
    yield _case("4/replicas, 2 x 2/1f1b", world, partial(replicas, "1f1b"))
    yield _case("4/replicas, 2 x 2/zb-v", world, partial(replicas, "zb-v"))
    yield _case("4/a checkpoint goes on as 2 x 2", world, partial(resumed, [[0, 1, 2, 3]], [[0, 1], [2, 3]]))
    yield _case("4/a checkpoint of two ranks goes on with four", world, partial(resumed, [[0, 1]], [[0, 1, 2, 3]]))
    for name, run in {
        "accumulation": accumulation,
        "evaluate and predict": evaluation,
        "clip_grad_norm_": clipping,
    }.items():
        yield _case(f"4/{name}/interleaved-1f1b", world, partial(run, "interleaved-1f1b"))
    yield _case("4/steps of two shapes/interleaved-1f1b", world, partial(steps, "interleaved-1f1b"))


def _case(name: str, world: World, run: Any) -> Case:
    return Case(f"ranks/{name}", PART, run, SECONDS, world=world, requires=GATE)


def _proof(name: str, world: World, model: str, precision: str, schedule: str, **options: Any) -> Case:
    return _case(name, world, partial(proof, model, precision, schedule, **options))


def _schedules(ranks: int) -> list[str]:
    """All that so many ranks can follow, the most used first."""
    first = ("1f1b", "interleaved-1f1b", "zb-h1", "dualpipe", "chimera", "gpipe")
    every = [*first, *(name for name in names() if name not in first)]
    possible = [ScheduleParams(ranks, MICROBATCHES, chunks) for chunks in (1, 2)]
    return [
        name for name in every if any(schedule_spec(name).violated_constraint(numbers) is None for numbers in possible)
    ]


def exchanges(setting: Setting) -> Found:
    """NCCL by itself, on as many ranks. Where Penstock initialises torch.distributed, it does so here."""
    if not dist.is_initialized():
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        penstock.pipeline(layers, (torch.randn(16, WIDTH),), devices=setting.device, loss_fn=F.mse_loss).close()
    return nccl.exchanges(setting, dist.get_rank())


def proof(
    model: str, precision: str, schedule: str, setting: Setting, bytes_at_least: int = 1, **options: Any
) -> Found:
    """`verify`, whose two steps differ over NCCL: in the first one layouts are learned."""
    make_repeatable(setting)
    options = {"transport": "distributed", "full_batch": False, "small": True, **options}
    with nccl.messages(setting) as sent:
        found = prove(setting, model, precision, schedule, **options)
    return _with_messages(found, sent, bytes_at_least)


def large_messages(schedule: str, setting: Setting) -> Found:
    """`verify`, where a send waits for its receive. gloo's always do."""
    return proof("wide", "float32", schedule, setting, small=None, bytes_at_least=WIDE_BYTES if setting.is_real else 1)


def _with_messages(found: Found, sent: Sequence[int], bytes_at_least: int = 1) -> Found:
    """Every rank has to have sent some over NCCL, as large as that, or nothing was shown."""
    largest = max(sent, default=0)
    found["each"] = {"messages": len(sent), "bytes": sum(sent), "largest": largest}
    if largest < bytes_at_least:
        return {**found, "ok": False, "says": f"this rank sent {largest} bytes at most over NCCL ({found['says']})"}
    return found


def steps(schedule: str, setting: Setting) -> Found:
    """Steps of two shapes, with weights that change, some with a timeline; each against the unsplit model."""
    wrong: list[str] = []
    spans = 0
    with nccl.messages(setting) as sent, _pipe_and_reference(setting, schedule=schedule) as (pipe, reference):
        for number, rows in enumerate((16, 16, 16, 24, 24, 16, 24)):
            x, y = _batch(setting, rows, number)
            result = pipe.step(x, target=y, timeline=number in (2, 4))
            wrong += [f"step {number}: {what}" for what in _differences(setting, pipe, reference, x, y, result)]
            if result.timeline is not None:
                spans = len([*result.timeline])
                wrong += impossible_messages(result.timeline, slack_seconds=1e-4 if setting.is_real else 0.0)
            for parameter in (*pipe.parameters(), *reference.parameters()):
                parameter.grad = None
                parameter.detach().mul_(0.9)  # as an optimizer changes them, and equal to the bit where they were
    says = "; ".join(wrong) or f"7 steps are those of one process; {spans} spans in a timeline"
    return _with_messages({"ok": not wrong and spans > 0, "says": says, "spans": spans}, sent)


class _pipe_and_reference:  # noqa: N801 (a `with` block reads like a call)
    """A pipeline of `Skips`, and the same model by itself."""

    def __init__(self, setting: Setting, **options: Any) -> None:
        torch.manual_seed(0)
        model = Skips(WIDTH)
        make_repeatable(setting)
        self._reference = copy.deepcopy(model).to(setting.device)
        usual = {"transport": "distributed", "microbatches": MICROBATCHES, "devices": setting.device}
        self._pipe = penstock.pipeline(model, (torch.randn(16, WIDTH),), loss_fn=F.mse_loss, **{**usual, **options})

    def __enter__(self) -> tuple[penstock.Pipeline, nn.Module]:
        return self._pipe.__enter__(), self._reference

    def __exit__(self, *error: Any) -> None:
        self._pipe.__exit__(*error)


def _batch(setting: Setting, rows: int, number: int) -> tuple[Tensor, Tensor]:
    """The same on every rank, on the device."""
    generator_ = torch.Generator().manual_seed(number)
    x, y = (torch.randn(rows, WIDTH, generator=generator_) for _ in range(2))
    return x.to(setting.device), y.to(setting.device)


def _differences(
    setting: Setting, pipe: penstock.Pipeline, reference: nn.Module, x: Tensor, y: Tensor, result: Any
) -> list[str]:
    """What of a step differs from one process, by hand. `verify` demands bits on the CPU alone, too."""
    expected = step_by_hand(reference, [x], y, F.mse_loss, MICROBATCHES).total
    return differences(pipe, reference, expected, result, exact=not setting.is_real)


def accumulation(schedule: str, setting: Setting) -> Found:
    """Steps without `zero_grad` between them add."""
    wrong: list[str] = []
    with nccl.messages(setting) as sent, _pipe_and_reference(setting, schedule=schedule) as (pipe, reference):
        for number in range(3):
            x, y = _batch(setting, 16, number)
            wrong += _differences(setting, pipe, reference, x, y, pipe.step(x, target=y))
    says = "; ".join(wrong) or "gradients of three steps add as in one process"
    return _with_messages({"ok": not wrong, "says": says}, sent)


def evaluation(schedule: str, setting: Setting) -> Found:
    """Losses and outputs between steps are those of one process without dropout; steps are as without them."""
    make_repeatable(setting)
    with nccl.messages(setting) as sent:
        steps_alone, _ = _evaluated(setting, schedule, between=False)
        steps_between, wrong = _evaluated(setting, schedule, between=True)
    if not all(map(torch.equal, steps_alone, steps_between)):
        wrong.append("steps differ from those without an evaluation between them")
    return _with_messages({"ok": not wrong, "says": "; ".join(wrong) or "as of one process"}, sent)


def _evaluated(setting: Setting, schedule: str, *, between: bool) -> tuple[list[Tensor], list[str]]:
    """The losses and gradients of three steps, which add, and what was wrong with the evaluations between them."""
    torch.manual_seed(0)
    made = gpt(small=True)
    reference = copy.deepcopy(made.model).to(setting.device).eval()
    options = {"microbatches": MICROBATCHES, "devices": setting.device, "transport": "distributed", "seed": 1}
    found: list[Tensor] = []
    wrong: list[str] = []
    with penstock.pipeline(made.model, made.args, loss_fn=made.loss, schedule=schedule, **options) as pipe:
        for number, rows in enumerate((16, 24, 16)):
            torch.manual_seed(number)
            batch = gpt(small=True, rows=rows)
            x, y = batch.args[0].to(setting.device), batch.target.to(setting.device)
            if between:
                loss, output = pipe.evaluate(x, target=y).loss, pipe.predict(x, outputs="all")
                with torch.no_grad():
                    expected = torch.cat([reference(part.clone()) for part in x.chunk(MICROBATCHES)])
                    pairs = {"loss": (loss, batch.loss(expected, y)), "output": (output, expected)}
                wrong += [f"the {name} of {rows} rows" for name, pair in pairs.items() if not _is_close(*pair)]
            found.append(pipe.step(x, target=y).loss.detach().clone())
            found += [parameter.grad.clone() for parameter in pipe.parameters() if parameter.grad is not None]
    return found, wrong


def _is_close(mine: Tensor, other: Tensor) -> bool:
    return float((mine.cpu() - other.cpu()).abs().max()) <= NEAR * float(other.abs().max())


def clipping(schedule: str, setting: Setting) -> Found:
    """The norm over all ranks, a tied weight once, and gradients scaled by it."""
    with nccl.messages(setting) as sent, _pipe_and_reference(setting, schedule=schedule) as (pipe, reference):
        x, y = _batch(setting, 16, 0)
        result = pipe.step(x, target=y)
        loss = step_by_hand(reference, [x], y, F.mse_loss, MICROBATCHES).total
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        norm = pipe.clip_grad_norm_(0.01)
        wrong = differences(pipe, reference, loss, result, exact=False)
        if not _is_close(norm, expected):
            wrong.append(f"the norm is {float(norm)}, not {float(expected)}")
    return _with_messages({"ok": not wrong, "says": "; ".join(wrong) or f"norm {float(norm):.6f} in both"}, sent)


def waiting(setting: Setting) -> Found:
    """The synchronizations of a steady step on this rank; none is allowed."""
    with nccl.messages(setting) as sent:
        found = synchronizations.of_rank(
            setting, dist.get_rank() if dist.is_initialized() else 0, {"transport": "distributed"}
        )
    return _with_messages(synchronizations.judged(found, 0), sent)


def command_line(setting: Setting) -> Found:
    """`penstock verify`, which starts ranks of its own. gloo's own rules hold for these where it stands in for NCCL."""
    here = Path(__file__).parents[1]
    path = os.pathsep.join(map(str, (here, Path(penstock.__file__).parents[1])))
    target = f"{here / 'cases' / 'models.py'}:for_command_line"
    options = ["--ranks", "2", "--transport", "distributed", "--schedule", "zb-h1", "--json"]
    command = [sys.executable, "-m", "penstock", "verify", target, *options]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    report = json.loads(done.stdout) if done.stdout.startswith("{") else {"ok": False, "summary": done.stdout}
    return {"ok": done.returncode == 0 and report["ok"], "says": f"{report['summary']} (status {done.returncode})"}


def _mesh(setting: Setting, ranks: list[list[int]]) -> DeviceMesh:
    return DeviceMesh(setting.device, ranks, mesh_dim_names=("dp", "pp"))


def replicas(schedule: str, setting: Setting) -> Found:
    """Two pipelines of two ranks, each on half of the batch: `verify`, and accumulation with `no_sync`."""
    make_repeatable(setting)
    mesh = _mesh(setting, [[0, 1], [2, 3]])
    half = mesh.get_local_rank("dp")
    torch.manual_seed(0)
    made = MODELS["skips"](True, rows=32)
    x, y = made.args[0].chunk(2)[half].clone(), made.target.chunk(2)[half].clone()
    options = {"mesh": mesh, "schedule": schedule, "devices": setting.device, "transport": "distributed"}
    with nccl.messages(setting) as sent:
        report = penstock.verify(
            made.model, (x,), target=y, loss_fn=F.mse_loss, microbatches=MICROBATCHES, full_batch=False, **options
        )
        wrong = _accumulated(setting, options, half) if report.ok else []
    also = "; no_sync adds as one process does" if report.ok else ""
    says = "; ".join(wrong) or report.summary() + also
    return _with_messages({"ok": report.ok and not wrong, "says": says}, sent)


def _accumulated(setting: Setting, options: dict[str, Any], half: int) -> list[str]:
    with _pipe_and_reference(setting, **options) as (pipe, reference):
        for number in range(2):
            x, y = _batch(setting, 32, number)
            mine = [each.chunk(2)[half].clone() for each in (x, y)]
            with pipe.no_sync() if number == 0 else nullcontext():
                result = pipe.step(mine[0], target=mine[1])
            expected = step_by_hand(reference, [x], y, F.mse_loss, MICROBATCHES).total
        return differences(pipe, reference, expected, result, exact=False)


def resumed(saved: list[list[int]], loaded: list[list[int]], setting: Setting) -> Found:
    """What the ranks of one mesh save goes on on another, under another schedule, as if nothing had happened."""
    make_repeatable(setting)
    with nccl.messages(setting) as sent:
        expected = [_trained(setting, _mesh(setting, saved), "1f1b", range(4))]
        dist.broadcast_object_list(expected, device=torch.device("cpu"))  # those outside of the first mesh wait here
        losses = _trained(setting, _mesh(setting, loaded), "zb-h1", range(2, 4))
    return _with_messages(as_expected(losses, expected[0]), sent)


def _trained(setting: Setting, mesh: DeviceMesh, schedule: str, numbers: range) -> list[float]:
    if dist.get_rank() not in mesh.mesh:
        return []
    part, parts = mesh.get_local_rank("dp"), mesh.size(0)
    batches = [tuple(each.chunk(parts)[part].clone() for each in _batch(setting, 32, number)) for number in numbers]
    with _pipe_and_reference(setting, mesh=mesh, schedule=schedule) as (pipe, _):
        if len(numbers) == 2:
            for parameter in pipe.parameters():
                parameter.detach().zero_()
        return around_a_checkpoint(pipe, batches, setting.folder / "saved")
