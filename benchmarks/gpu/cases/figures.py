"""Figures of one device: what an action costs besides its work, how W adds its products, timelines, and memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import penstock
from cases.case import Case, Found, Setting, UnsupportedError
from cases.models import gpt
from cases.ranks import on_ranks
from penstock.schedule import generate
from penstock.simulate import StageCost, memory, simulate

PART = 4

MAX_MICROSECONDS = 40.0
"""Of Python's own time for an action, beyond the bare call of its stage."""

SCHEDULES = ("1f1b", "interleaved-1f1b", "zb-h1")


def cases() -> Iterator[Case]:
    for schedule in SCHEDULES:
        yield Case(f"figures/microseconds per action/{schedule}", PART, partial(per_action, schedule), alone=True)
    yield Case("figures/microseconds per action/beside torch's", PART, beside_torch, alone=True)
    yield Case("figures/copies beside computing", PART, overlap, alone=True)
    yield Case("figures/a step with a timeline", PART, timelines, alone=True)
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        yield Case(f"figures/addmm_ against product and add/{name}", PART, partial(products, dtype), alone=True)
    yield Case("figures/peak memory", PART, peaks)


def _seconds(setting: Setting, run: Callable[[], object], times: int) -> float:
    """The median of several, until the device is done."""
    taken = []
    for number in range(-3, times if setting.is_real else 2):
        setting.synchronize()
        began = time.perf_counter()
        run()
        setting.synchronize()
        if number >= 0:
            taken.append(time.perf_counter() - began)
    return statistics.median(taken)


WIDTH, LAYERS, MICROBATCHES = 32, 8, 32


def _small() -> tuple[nn.Sequential, Tensor]:
    """So small that the host takes longer than the device."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)]
    return nn.Sequential(*layers), torch.randn(MICROBATCHES, WIDTH)


def per_action(schedule: str, setting: Setting) -> Found:
    """A step of four ranks in this process, less the same forwards and backwards called barely, over its actions."""
    setting.prepare()
    model, x = _small()
    options = {"microbatches": MICROBATCHES, "loss_fn": F.mse_loss, "devices": setting.device, "schedule": schedule}
    with penstock.pipeline(model, (x,), ranks=4, **options) as pipe:
        count = sum(action.op.is_compute for row in pipe.schedule.rows for action in row)
        whole = _seconds(setting, lambda: pipe.step(x, target=x), 20)
        stages = len(pipe.stages)
    bare_model = _small()[0].to(setting.device)
    size = LAYERS // stages
    parts = [bare_model[first : first + size] for first in range(0, LAYERS, size)]
    row = torch.randn(1, WIDTH).to(setting.device)
    gradient = torch.randn(1, WIDTH).to(setting.device)

    def bare() -> None:
        for _ in range(MICROBATCHES):
            for part in parts[:-1]:
                torch.autograd.backward(part(row.detach().requires_grad_()), gradient)
            torch.autograd.backward(F.mse_loss(parts[-1](row.detach().requires_grad_()), row))

    bare_seconds = _seconds(setting, bare, 20)
    each = 1e6 * (whole - bare_seconds) / count
    says = f"{each:.1f} microseconds for each of {count} actions beyond the bare call (aim: {MAX_MICROSECONDS:.0f})"
    figures = {"microseconds": each, "actions": count, "step_seconds": whole, "bare_seconds": bare_seconds}
    return {"says": says, "reached": each <= MAX_MICROSECONDS, **figures}


def beside_torch(setting: Setting) -> Found:
    """A step of one stage, by Penstock and by `torch.distributed.pipelining`, in turns in this process."""
    setting.prepare()
    store = dist.FileStore(str(setting.folder / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    device = torch.device(setting.device, 0) if setting.device != "cpu" else torch.device("cpu")
    torchs, x = _small()[0].to(device), _small()[1].to(device)
    stage = PipelineStage(torchs, 0, 1, device)
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=F.mse_loss)
    options: dict[str, Any] = {"microbatches": MICROBATCHES, "loss_fn": F.mse_loss, "devices": setting.device}
    found: dict[str, list[float]] = {"penstock": [], "torch": []}
    with penstock.pipeline(_small()[0], (x,), ranks=1, **options) as pipe:
        for _ in range(3):
            found["penstock"].append(_seconds(setting, lambda: pipe.step(x, target=x), 20))
            found["torch"].append(_seconds(setting, lambda: schedule.step(x, target=x), 20))
    dist.destroy_process_group()
    each = {name: 1e6 * min(seconds) / (2 * MICROBATCHES) for name, seconds in found.items()}
    says = ", ".join(f"{name} {microseconds:.1f}" for name, microseconds in each.items())
    return {"says": f"microseconds of a step for each action, the stage's own included: {says}", **each}


def overlap(setting: Setting) -> Found:
    """How much of the time of offload's copies kernels run as well, as torch's profiler sees it."""
    setting.need_cuda("a copy beside computing")
    setting.prepare()
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(2048, 2048), nn.Tanh()) for _ in range(LAYERS)]
    x = torch.randn(4 * 8192, 2048, device=setting.device)
    options: dict[str, Any] = {"microbatches": 4, "loss_fn": F.mse_loss, "devices": setting.device, "schedule": "gpipe"}
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with penstock.pipeline(nn.Sequential(*layers), (x,), ranks=2, offload=True, **options) as pipe:
        for _ in range(3):
            pipe.step(x, target=x)
        setting.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            pipe.step(x, target=x)
            setting.synchronize()
    on_device = [event for event in profiler.events() or [] if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in on_device
        if not event.is_user_annotation
    ]
    copies = [(a, b) for name, a, b in spans if name.startswith(("Memcpy DtoH", "Memcpy HtoD"))]
    kernels = merged((a, b) for name, a, b in spans if not name.startswith(("Memcpy", "Memset")))
    whole = sum(b - a for a, b in merged(copies))
    beside = sum(max(0.0, min(b, d) - max(a, c)) for a, b in merged(copies) for c, d in kernels)
    if not whole or not kernels:
        raise UnsupportedError(f"the profiler saw {len(copies)} copies and {len(kernels)} kernels")
    says = f"kernels run during {beside / whole:.0%} of the {whole / 1e3:.1f} ms of {len(copies)} copies"
    return {"ok": beside > 0.1 * whole, "says": says, "share": beside / whole, "copies": len(copies)}


def merged(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The times that any of these cover, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def timelines(setting: Setting) -> Found:
    """What a timeline adds to a step of small layers."""
    setting.prepare()
    torch.manual_seed(0)
    given = gpt(not setting.is_real)
    options = {"microbatches": 8, "loss_fn": given.loss, "devices": setting.device}
    with penstock.pipeline(given.model, given.args, ranks=4, **options) as pipe:
        with_one, without = [], []
        for _ in range(3):  # in turns, so that other load is on both
            without.append(_seconds(setting, lambda: pipe.step(*given.args, target=given.target), 5))
            with_one.append(_seconds(setting, lambda: pipe.step(*given.args, target=given.target, timeline=True), 5))
        timeline = pipe.step(*given.args, target=given.target, timeline=True).timeline
    assert timeline is not None
    more = min(with_one) / min(without) - 1
    spans = sum(1 for rank in range(4) for _ in timeline.spans(rank))
    says = f"a step takes {more:+.1%} with a timeline, of {spans} spans (aim: below 2%)"
    assert spans > 0
    return {"says": says, "more": more, "reached": more < 0.02, "seconds": min(without)}


def products(dtype: torch.dtype, setting: Setting) -> Found:
    """A weight's gradient added in place, against a product in memory of its own that is then added."""
    setting.prepare()
    found: dict[str, dict[str, float]] = {}
    for size in (4096, 6144, 8192) if setting.is_real else (64, 96):
        tokens = 4096 if setting.is_real else 32
        first, second = (
            torch.randn(*shape, dtype=dtype).to(setting.device) for shape in ((size, tokens), (tokens, size))
        )
        total = torch.zeros(size, size, dtype=dtype).to(setting.device)
        in_place = _seconds(setting, lambda t=total, a=first, b=second: t.addmm_(a, b), 20)
        apart = _seconds(setting, lambda t=total, a=first, b=second: t.add_(a.mm(b)), 20)
        found[str(size)] = {"addmm_": in_place, "product and add": apart, "ratio": in_place / apart}
    ratios = ", ".join(f"{each['ratio']:.2f} at {size}" for size, each in found.items())
    return {"says": f"addmm_ takes, of a product and an addition: {ratios}", "seconds": found}


MAX_APART = 0.10
"""By how much a peak may differ from its prediction."""


def peaks(setting: Setting) -> Found:
    """The peak of each of two ranks against the simulator's, which knows what a microbatch takes from gpipe's peaks.

    Recomputation and offload have to take less than gpipe without them.
    """
    setting.need_cuda("the allocator's peak")
    few, more = (on_ranks(setting, 2, _peak, "gpipe", m) for m in (2, 4))
    costs = [StageCost(1.0, 1.0, 1.0, activation_bytes=max(0, b - a) / 2) for a, b in zip(few, more, strict=True)]
    found: dict[str, Found] = {}
    for schedule in ("gpipe", "1f1b", "zb-h1"):
        measured = on_ranks(setting, 2, _peak, schedule, 8)
        predicted = predictions(schedule, costs, few)
        found[schedule] = against(predicted, measured, is_most=schedule.startswith("zb"))
    for name, option in {"recompute": {"recompute": "always"}, "offload": {"offload": True}}.items():
        measured = on_ranks(setting, 2, _peak, "gpipe", 8, option)
        found[f"gpipe, {name}"] = below(measured, found["gpipe"]["measured_bytes"])
    says = "; ".join(f"{name}: {each['says']}" for name, each in found.items())
    return {"ok": all(each["ok"] for each in found.values()), "says": says, "by_name": found}


def below(measured: list[int], without: list[int]) -> Found:
    """Peaks with a feature that saves memory, and those without it."""
    shares = [there / usual for there, usual in zip(measured, without, strict=True)]
    says = ", ".join(f"rank {rank}: {share:.0%}" for rank, share in enumerate(shares))
    return {"ok": max(shares) < 1.0, "says": f"{says} of gpipe's", "measured_bytes": measured}


def predictions(schedule: str, costs: list[StageCost], few: list[int]) -> list[float]:
    """Each rank's peak for 8 microbatches: gpipe's for two, and what the simulator says is kept besides those."""
    order = generate(schedule, ranks=2, microbatches=8)
    if schedule.startswith("zb"):  # not known is which part W needs: at most all
        costs = [
            StageCost(1.0, 1.0, 1.0, activation_bytes=c.activation_bytes, weight_gradient_bytes=c.activation_bytes)
            for c in costs
        ]
    kept = memory(order, costs, simulate(order, costs))
    both = zip(few, kept, costs, strict=True)
    return [peak + of_rank.peak_activations - 2 * cost.activation_bytes for peak, of_rank, cost in both]


def against(predicted: list[float], measured: list[int], *, is_most: bool) -> Found:
    """Predictions and measurements, of each rank."""
    ratios = [there / ahead for there, ahead in zip(measured, predicted, strict=True)]
    ok = all(ratio <= 1 + MAX_APART and (is_most or ratio >= 1 - MAX_APART) for ratio in ratios)
    mib = [
        f"rank {r}: {m / 2**20:.0f} MiB, predicted {p / 2**20:.0f}"
        for r, (m, p) in enumerate(zip(measured, predicted, strict=True))
    ]
    says = f"{', '.join(mib)}{' at most' if is_most else ''}"
    return {"ok": ok, "says": says, "measured_bytes": measured, "predicted_bytes": predicted, "ratios": ratios}


def _peak(
    setting: Setting, rank: int, schedule: str, microbatches: int, more: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """The most bytes that tensors took in a step. A microbatch has four rows, however many there are."""
    torch.manual_seed(0)
    given = gpt(not setting.is_real, rows=4 * microbatches)
    options = {"microbatches": microbatches, "loss_fn": given.loss, "devices": setting.device, "transport": "staged"}
    with penstock.pipeline(given.model, given.args, schedule=schedule, **options, **more) as pipe:
        for _ in range(3):
            setting.synchronize()
            torch.cuda.reset_peak_memory_stats()
            pipe.step(*given.args, target=given.target)
        setting.synchronize()
        return int(torch.cuda.max_memory_allocated())
