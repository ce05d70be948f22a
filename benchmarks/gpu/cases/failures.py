"""A rank that falls in its second step: the others end, and name it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from cases import nccl, ranks
from cases.case import Case, Found, Setting
from penstock.distributed.failure_detector import Timeouts

PART = 1
RANKS, VICTIM = 3, 2
Over = Literal["staged", "nccl"]
MAX_SECONDS = 20.0
"""From the fall to the end of all others."""
START_SECONDS = 30.0
"""Until one falls."""
MAX_UNNAMED_SECONDS = {"stop": 10.0}
"""From the fall until each of the others has named who fell; 5 if not said here. Five pass without a sign of life."""

SAID = {
    "kill": r"rank 2 was lost, last seen at 2F.*its process is gone",
    "stop": r"rank 2 was lost, last seen at 2F.*its process is stopped",
    "out of memory": r"rank 2 failed at 2F.*(OutOfMemory|memory)",
    "raise in backward": r"rank 2 failed at 2B.*ValueError: planted",
}
"""By how a rank falls: what each of the others says."""


def cases() -> Iterator[Case]:
    for how in SAID:
        yield Case(f"falls/{how}", PART, partial(falls, how))
    yield Case("falls/the device hangs", PART, hangs)


def cases_over_nccl() -> Iterator[Case]:
    for how in SAID:
        yield Case(f"ranks/falls/{how}", nccl.PART, partial(falls, how, over="nccl"), requires=nccl.GATE)


class Planted(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("planted")


def falls(how: str, setting: Setting, over: Over = "staged") -> Found:
    """Seconds until all others have named who fell, and until they have ended."""
    said, statuses, named_at = _run(setting, how, over)
    mark = setting.folder / "fell"
    others = [rank for rank in range(RANKS) if rank != VICTIM]
    fell = mark.stat().st_mtime if mark.exists() else float("-inf")
    seconds = max(statuses[rank][1] for rank in others) - fell
    named = max(named_at.get(rank, float("inf")) for rank in others) - fell
    ended = all(statuses[rank][0] not in (0, None) for rank in others)
    last = next((line for line in said[0].splitlines()[::-1] if "rank 2" in line), "nothing")
    says = f"named after {named:.1f} s, all others ended after {seconds:.1f} s; rank 0 says: {last[-200:]}"
    ok = ended and seconds < MAX_SECONDS and named < MAX_UNNAMED_SECONDS.get(how, 5.0)
    statuses_ = [status for status, _ in statuses]
    return {"ok": ok, "says": says, "seconds": seconds, "named": named, "statuses": statuses_, "said": said}


def hangs(setting: Setting) -> Found:
    """A kernel that takes seconds: those who wait say whose device it is, and where that is."""
    setting.need_cuda("a kernel that takes seconds")
    said, statuses, _ = _run(setting, "sleep", "staged")
    named = any("the device of rank 2" in text for text in said)
    ended = all(status == 0 for status, _ in statuses)
    line = next((line for text in said for line in text.splitlines() if "the device of rank 2" in line), "nothing")
    return {"ok": named and ended, "says": line[-250:], "said": said}


def _run(setting: Setting, how: str, over: Over) -> tuple[list[str], list[tuple[int | None, float]], dict[int, float]]:
    """What each rank wrote; its exit status (None: it was still there) and when it ended; when it named who fell."""
    backend = nccl.backend(setting) if over == "nccl" else "gloo"
    processes = ranks.forks(setting, setting.folder, RANKS, _rank, how, over, backend=backend)
    files = [setting.folder / f"said.{rank}" for rank in range(RANKS)]
    ends: dict[int, tuple[int | None, float]] = {}
    named: dict[int, float] = {}
    awaited = set(range(RANKS)) - (set() if how == "sleep" else {VICTIM})
    until = time.time() + START_SECONDS * setting.patience
    mark = setting.folder / "fell"
    while awaited - ends.keys() and time.time() < until:
        if mark.exists():
            until = mark.stat().st_mtime + MAX_SECONDS
        for rank, process in enumerate(processes):
            has_ended = process.exitcode is not None  # before reading what it said last
            if rank not in named and files[rank].exists() and re.search(SAID.get(how, "$^"), files[rank].read_text()):
                named[rank] = time.time()
            if rank not in ends and has_ended:
                ends[rank] = process.exitcode, time.time()
        time.sleep(0.02)
    ranks.end(processes)
    said = [file.read_text() if file.exists() else "" for file in files]
    return said, [ends.get(rank, (None, float("inf"))) for rank in range(RANKS)], named


def _rank(setting: Setting, rank: int, how: str, over: Over) -> None:
    log = os.open(setting.folder / f"said.{rank}", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    if how == "sleep":
        _warn_soon()
    transport = "distributed" if over == "nccl" else "auto" if setting.device == "cpu" else "staged"
    with nccl.rules(setting) if over == "nccl" else nullcontext():
        train(setting, how, transport)


def train(setting: Setting, how: str, transport: str) -> None:
    """Four steps; in the second one the last rank falls."""
    torch.manual_seed(0)
    layers, x = nn.Sequential(*(nn.Linear(16, 16) for _ in range(RANKS))), torch.randn(8, 16)
    calls = iter(range(1000))
    options = {"microbatches": 4, "devices": setting.device, "transport": transport}

    def loss(output: Tensor, target: Tensor) -> Tensor:
        value = F.mse_loss(output, target)
        return _fall(how, value, setting.folder / "fell") if next(calls) == 6 else value

    with penstock.pipeline(layers, (x,), loss_fn=loss, **options) as pipe:
        for _ in range(4):
            float(pipe.step(x, target=x).loss)


def _fall(how: str, value: Tensor, mark: Path) -> Tensor:
    if how in ("kill", "stop"):
        time.sleep(2 * Timeouts().beat_seconds)  # so that the others have seen where it is
    mark.touch()
    if how == "sleep":
        torch.cuda._sleep(int(8e9))  # private, but there is no public kernel that waits; some four seconds
        return value
    if how == "out of memory":
        torch.empty(1 << 50, device=value.device)
    if how == "raise in backward":
        return Planted.apply(value)  # type: ignore[no-any-return, no-untyped-call]
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
    return value


def _warn_soon() -> None:
    """A notice each second rather than each half minute."""
    from penstock.pipe import build

    build.Timeouts = partial(Timeouts, beat_seconds=0.1, warn_seconds=1.0)  # type: ignore[assignment, misc]
