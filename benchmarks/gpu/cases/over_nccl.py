"""Penstock over NCCL: two, three and four ranks share the GPU, and torchrun starts them.

They show order, results and what hangs, never speed. Models are tiny, since ranks take turns on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import penstock
from cases import falls, nccl
from cases.case import Case, Found, NotHereError, Setting, World
from cases.models import MODELS, Skips
from cases.nccl import GATE, PART
from cases.proofs import MICROBATCHES, SLICED, make_repeatable, prove
from penstock import checkpoint
from penstock.schedule import generator, names
from penstock.schedule.generators import Numbers

SECONDS = 45.0
"""For a case that takes a few."""

WORLDS = {2: World(2, "own"), 4: World(4, "both"), 3: World(3, "device_id")}
"""The most telling first. NCCL makes a communicator for each pair of ranks, or with a device one for each group."""

ONLY_NCCL = World(2, "nccl")
ONE_CONNECTION = World(2, "both", environment=(("CUDA_DEVICE_MAX_CONNECTIONS", "1"),))
"""As Megatron-LM sets it: all streams of a process share one queue of the device, and ranks could hang."""

MANY_CONNECTIONS = World(4, "both", environment=(("CUDA_DEVICE_MAX_CONNECTIONS", "32"),))
"""A queue of the device for each communicator: of eight, which is usual, a rank with two copies needs more."""

MODEL = {2: "gpt", 3: "mlp", 4: "skips"}
"""Two ranks: a tie and dropout; four: values that skip two cuts, and a tie."""

PRECISE = (("gpt", "autocast", "zb-h1"), ("gpt", "bf16", "1f1b"), ("gpt", "fp16", "interleaved-1f1b"))

WIDTH = 9


def cases() -> Iterator[Case]:
    for ranks, world in WORLDS.items():
        yield _case(f"{ranks}/nccl by itself", world, exchanges)
        first, *rest = _schedules(ranks)
        yield _proof(f"{ranks}/verify/{first}", world, MODEL[ranks], "float32", first)
        yield _case(f"{ranks}/steps of two shapes/1f1b", world, partial(steps, "1f1b"))
        for schedule in rest:
            yield _proof(f"{ranks}/verify/{schedule}", world, MODEL[ranks], "float32", schedule)
        yield from {2: _of_two, 3: _of_three, 4: _of_four}[ranks](world)
    yield from falls.cases_over_nccl()
    yield _proof("2 with NCCL only/verify/1f1b", ONLY_NCCL, "skips", "float32", "1f1b")
    for schedule in ("dualpipe", "chimera"):
        yield _proof(f"4 with 32 connections/verify/{schedule}", MANY_CONNECTIONS, "skips", "float32", schedule)
    yield _case("2 with one connection/refused", ONE_CONNECTION, one_connection)


def _of_two(world: World) -> Iterator[Case]:
    for name, precision, schedule in PRECISE:
        yield _proof(f"2/verify/{precision}/{schedule}", world, name, precision, schedule)
    yield _case("2/accumulation", world, accumulation)
    yield _case("2/evaluate and predict", world, evaluation)
    yield _case("2/clip_grad_norm_", world, clipping)
    yield _proof("2/verify/transport='auto'", world, "skips", "float32", "1f1b", transport="auto")
    yield _proof("2/verify/recompute", world, "gpt", "float32", "1f1b", recompute="always")
    yield _proof("2/verify/offload", world, "gpt", "float32", "gpipe", offload=True)
    yield _proof("2/verify/batch norm", world, "convnet", "float32", "1f1b")
    yield _case("2/verify/llama", world, partial(proof, "llama", "float32", "zb-h1"), 2 * SECONDS)  # imports for long
    yield _case("2/steps of two shapes/zb-v", world, partial(steps, "zb-v"))


def _of_three(world: World) -> Iterator[Case]:
    yield _case("3/steps of two shapes/interleaved-1f1b", world, partial(steps, "interleaved-1f1b"))


def _of_four(world: World) -> Iterator[Case]:
    yield _case("4/replicas, 2 x 2/1f1b", world, partial(replicas, "1f1b"))
    yield _case("4/replicas, 2 x 2/zb-v", world, partial(replicas, "zb-v"))
    yield _case("4/a checkpoint goes on as 2 x 2", world, resumed)
    yield _case("4/steps of two shapes/interleaved-1f1b", world, partial(steps, "interleaved-1f1b"))


def _case(name: str, world: World, run: Any, seconds: float = SECONDS) -> Case:
    return Case(f"ranks/{name}", PART, run, seconds, world=world, after=GATE)


def _proof(
    name: str, world: World, model: str, precision: str, schedule: str, *, seconds: float = SECONDS, **options: Any
) -> Case:
    return _case(name, world, partial(proof, model, precision, schedule, **options), seconds)


def _schedules(ranks: int) -> list[str]:
    """All that so many ranks can follow, the most used first."""
    first = ("1f1b", "interleaved-1f1b", "zb-h1", "dualpipe", "gpipe")
    every = [*first, *(name for name in names() if name not in (*first, SLICED))]
    possible = [Numbers(ranks, MICROBATCHES, chunks) for chunks in (1, 2)]
    return [name for name in every if any(generator(name).broken(numbers) is None for numbers in possible)]


def exchanges(setting: Setting) -> Found:
    """NCCL by itself, on as many ranks. Where Penstock initialises torch.distributed, it does so here."""
    if not dist.is_initialized():
        layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        penstock.pipeline(layers, (torch.randn(16, WIDTH),), devices=setting.device, loss=F.mse_loss).close()
    return nccl.exchanges(setting, dist.get_rank())


def proof(model: str, precision: str, schedule: str, setting: Setting, **options: Any) -> Found:
    """`verify`, whose two steps differ over NCCL: in the first one layouts are learned."""
    make_repeatable(setting)
    options = {"transport": "distributed", "whole_batch": False, "small": True, **options}
    with nccl.messages(setting) as sent:
        found = prove(setting, model, precision, schedule, **options)
    return _with_messages(found, sent)


def one_connection(setting: Setting) -> Found:
    """Is refused, before anything could hang."""
    if not setting.is_real:
        raise NotHereError("only a GPU has queues")
    try:
        proof("skips", "float32", "1f1b", setting)
    except penstock.ArgumentError as error:
        return {"ok": "CUDA_DEVICE_MAX_CONNECTIONS=1" in str(error), "says": str(error)}
    return {"ok": False, "says": "not refused, though receives hold up what is computed"}


def _with_messages(found: Found, sent: Sequence[int]) -> Found:
    """Every rank has to have sent some over NCCL, or nothing was shown."""
    found["each"] = {"messages": len(sent), "bytes": sum(sent)}
    if not sent:
        return {**found, "ok": False, "says": f"this rank has sent nothing over NCCL ({found['says']})"}
    return found


def steps(schedule: str, setting: Setting) -> Found:
    """Steps with batches of two shapes, trained on, some with a timeline; each against the unsplit model."""
    with nccl.messages(setting) as sent:
        differing, spans = _steps(schedule, setting)
    says = "; ".join(differing) or f"7 steps are those of one process; {spans} spans in a timeline"
    return _with_messages({"ok": not differing and spans > 0, "says": says, "spans": spans}, sent)


def _steps(schedule: str, setting: Setting) -> tuple[list[str], int]:
    differing: list[str] = []
    spans = 0
    with _pipe_and_reference(setting, schedule=schedule) as (pipe, reference):
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (pipe, reference)]
        for number, rows in enumerate((16, 16, 16, 24, 24, 16, 24)):
            x, y = _batch(setting, rows, number)
            for optimizer in optimizers:
                optimizer.zero_grad()
            result = pipe.step(x, target=y, timeline=number in (2, 4))
            expected = by_hand(reference, x, y)
            differing += [f"step {number}: {what}" for what in differences(pipe, reference, expected, result.loss)]
            if result.timeline is not None:
                assert result.timeline.makespan_seconds > 0
                spans = sum(1 for _ in result.timeline)
            for optimizer in optimizers:
                optimizer.step()
    return differing, spans


class _pipe_and_reference:  # noqa: N801 (a `with` block reads like a call)
    """A pipeline of `Skips`, and the same model by itself."""

    def __init__(self, setting: Setting, **options: Any) -> None:
        torch.manual_seed(0)
        model = Skips(WIDTH)
        make_repeatable(setting)
        self._reference = copy.deepcopy(model).to(setting.device)
        usual = {"transport": "distributed", "microbatches": MICROBATCHES, "devices": setting.device}
        self._pipe = penstock.pipeline(model, (torch.randn(16, WIDTH),), loss=F.mse_loss, **{**usual, **options})

    def __enter__(self) -> tuple[penstock.Pipeline, nn.Module]:
        return self._pipe.__enter__(), self._reference

    def __exit__(self, *error: Any) -> None:
        self._pipe.__exit__(*error)


def _batch(setting: Setting, rows: int, number: int) -> tuple[Tensor, Tensor]:
    """The same on every rank, on the device."""
    generator_ = torch.Generator().manual_seed(number)
    x, y = (torch.randn(rows, WIDTH, generator=generator_) for _ in range(2))
    return x.to(setting.device), y.to(setting.device)


def by_hand(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The loss of a step of one process on the same microbatches; gradients are added to the model's."""
    total = torch.zeros((), device=x.device)
    for inputs, wanted in zip(x.chunk(MICROBATCHES), y.chunk(MICROBATCHES), strict=True):
        loss = F.mse_loss(model(inputs.clone()), wanted.clone()) * (len(inputs) / len(x))
        loss.backward()
        total += loss.detach()
    return total


def differences(pipe: penstock.Pipeline, reference: nn.Module, expected: Tensor, loss: Tensor) -> list[str]:
    """The loss and this rank's gradients that are not those of the reference."""
    named = dict(reference.named_parameters())
    pairs = [("the loss", loss.detach().cpu(), expected.cpu())]
    for name, parameter in pipe.named_parameters():
        other = named[name].grad
        if parameter.grad is None or other is None:
            if parameter.grad is not other:
                return [f"the gradient of {name} is missing"]
            continue
        pairs.append((f"the gradient of {name}", parameter.grad.cpu(), other.cpu()))
    return [name for name, mine, other in pairs if not _is_close(mine, other)]


def _is_close(mine: Tensor, other: Tensor) -> bool:
    """As `verify` has it where bits are not demanded, if not that strictly for small entries."""
    return float((mine - other).abs().max()) <= 1e-5 * max(1e-3, float(other.abs().max()))


def accumulation(setting: Setting) -> Found:
    """Two steps without `zero_grad` between them add."""
    with nccl.messages(setting) as sent, _pipe_and_reference(setting, schedule="zb-h1") as (pipe, reference):
        differing = []
        for number in range(3):
            x, y = _batch(setting, 16, number)
            result = pipe.step(x, target=y)
            differing += differences(pipe, reference, by_hand(reference, x, y), result.loss)
    says = "; ".join(differing) or "gradients of three steps add as in one process"
    return _with_messages({"ok": not differing, "says": says}, sent)


def evaluation(setting: Setting) -> Found:
    """Losses and outputs, between steps, which leave no gradient."""
    with nccl.messages(setting) as sent, _pipe_and_reference(setting) as (pipe, reference):
        x, y = _batch(setting, 16, 0)
        wrong = []
        for number, rows in enumerate((16, 24, 16)):
            x, y = _batch(setting, rows, number)
            loss = pipe.evaluate(x, target=y).loss
            output = pipe.predict(x, outputs="all")
            with torch.no_grad():
                expected = reference(x)
            pairs = {"loss": (loss, F.mse_loss(expected, y)), "output": (output, expected)}
            wrong += [f"the {name} of {rows} rows" for name, (a, b) in pairs.items() if not _is_close(a.cpu(), b.cpu())]
            pipe.step(x, target=y)
    return _with_messages({"ok": not wrong, "says": "; ".join(wrong) or "as of one process"}, sent)


def clipping(setting: Setting) -> Found:
    """The norm over all ranks, a tied weight once, and gradients scaled by it."""
    with nccl.messages(setting) as sent, _pipe_and_reference(setting) as (pipe, reference):
        x, y = _batch(setting, 16, 0)
        loss = pipe.step(x, target=y).loss
        expected_loss = by_hand(reference, x, y)
        expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
        norm = pipe.clip_grad_norm_(0.01)
        wrong = differences(pipe, reference, expected_loss, loss)
        if not _is_close(norm.cpu(), expected.cpu()):
            wrong.append(f"the norm is {float(norm)}, not {float(expected)}")
    return _with_messages({"ok": not wrong, "says": "; ".join(wrong) or f"norm {float(norm):.6f} in both"}, sent)


def _mesh(setting: Setting) -> DeviceMesh:
    return init_device_mesh(setting.device, (2, 2), mesh_dim_names=("dp", "pp"))


def replicas(schedule: str, setting: Setting) -> Found:
    """Two pipelines of two ranks, each on half of the batch: `verify`, and accumulation with `no_sync`."""
    make_repeatable(setting)
    mesh = _mesh(setting)
    half = mesh.get_local_rank("dp")
    torch.manual_seed(0)
    made = MODELS["skips"](True, rows=32)
    x, y = made.args[0].chunk(2)[half].clone(), made.target.chunk(2)[half].clone()
    options = {"mesh": mesh, "schedule": schedule, "devices": setting.device, "transport": "distributed"}
    with nccl.messages(setting) as sent:
        report = penstock.verify(
            made.model, (x,), target=y, loss_fn=F.mse_loss, microbatches=MICROBATCHES, whole_batch=False, **options
        )
        wrong = _accumulated(setting, options, half) if report.ok else []
    says = "; ".join(wrong) or f"{report.summary()}; no_sync adds as one process does"
    return _with_messages({"ok": report.ok and not wrong, "says": says}, sent)


def _accumulated(setting: Setting, options: dict[str, Any], half: int) -> list[str]:
    with _pipe_and_reference(setting, **options) as (pipe, reference):
        for number in range(2):
            x, y = _batch(setting, 32, number)
            mine = [each.chunk(2)[half].clone() for each in (x, y)]
            with torch.enable_grad():
                if number == 0:
                    with pipe.no_sync():
                        pipe.step(mine[0], target=mine[1])
                else:
                    loss = pipe.step(mine[0], target=mine[1]).loss
            expected = by_hand(reference, x, y)
        return differences(pipe, reference, expected, loss)


def resumed(setting: Setting) -> Found:
    """What four ranks save goes on as two pipelines of two, under another schedule, as if nothing had happened."""
    make_repeatable(setting)
    folder = setting.folder / "saved"

    def train(pipe: penstock.Pipeline, optimizer: Any, numbers: Sequence[int], part: int | None) -> list[float]:
        losses = []
        for number in numbers:
            x, y = _batch(setting, 32, number)
            if part is not None:
                x, y = x.chunk(2)[part].clone(), y.chunk(2)[part].clone()
            optimizer.zero_grad()
            losses.append(float(pipe.step(x, target=y).loss))
            optimizer.step()
        return losses

    with nccl.messages(setting) as sent:
        with _pipe_and_reference(setting) as (pipe, _):
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            train(pipe, optimizer, (0, 1), None)
            checkpoint.save(folder, pipe, optimizer)
            expected = train(pipe, optimizer, (2, 3), None)
        mesh = _mesh(setting)
        with _pipe_and_reference(setting, mesh=mesh, schedule="zb-h1") as (pipe, _):
            for parameter in pipe.parameters():
                parameter.detach().zero_()
            optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.01)
            checkpoint.load(folder, pipe, optimizer)
            found = train(pipe, optimizer, (2, 3), mesh.get_local_rank("dp"))
    apart = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
    says = f"losses of the next two steps differ by {apart:.1e} of themselves"
    return _with_messages({"ok": apart < 1e-4, "says": says, "losses": found, "expected": expected}, sent)
