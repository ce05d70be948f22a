"""`penstock.verify` for every schedule, precision and model, in one process and in several on the staged transport."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

import penstock
from cases.case import Case, Found, Setting, UnsupportedError, World
from cases.models import MODELS, Model
from cases.ranks import on_ranks
from penstock.schedule import names, schedule_spec

ONE_PROCESS, PROCESSES = 4, 2
"""How many ranks one process drives, and how many processes there are."""

MICROBATCHES = 8

PRECISIONS = ("float32", "bf16", "autocast", "fp16")
"""The model in float32; wholly in bfloat16; its step in torch.autocast to bfloat16; to float16, with a scaled loss."""

SCALE = 2.0**10
"""Of the loss in float16."""

TWO_COPIES = ("chimera", "dualpipe")
"""These refuse batch norm, of which each copy would see half of the batch."""

MODEL_NAMES = ("mlp", "convnet", "gpt", "llama")

PRECISE = (("gpt", "autocast", "zb-h1"), ("gpt", "bf16", "1f1b"), ("gpt", "fp16", "interleaved-1f1b"))
"""What is shown in other precisions between processes."""

MIN_SHARE = 0.3
"""Of a stage's trained elements, how many have to wait for W where the backward is split. 0: I does everything."""


def cases() -> Iterator[Case]:
    schedules = names()
    for precision, name, schedule in product(PRECISIONS, MODEL_NAMES, schedules):
        run, world = partial(in_one_process, name, precision, schedule), World(1, name=f"{name}, {precision}")
        yield Case(f"verify/one process/{name}/{precision}/{schedule}", 2, run, world=world)
    for name, precision, schedule in (*PRECISE, *product(("gpt", "convnet"), ("float32",), schedules)):
        run, world = partial(in_a_world, name, precision, schedule), World(PROCESSES, name=f"{name}, {precision}")
        yield Case(f"verify/{PROCESSES} processes/{name}/{precision}/{schedule}", 3, run, world=world)


def in_one_process(name: str, precision: str, schedule: str, setting: Setting, **options: Any) -> Found:
    setting.prepare()
    make_repeatable(setting)
    return _or_refused(name, schedule, partial(prove, setting, name, precision, schedule, ranks=ONE_PROCESS, **options))


def in_a_world(name: str, precision: str, schedule: str, setting: Setting) -> Found:
    return _or_refused(name, schedule, partial(_on_one_rank, setting, 0, name, precision, schedule, {}))


def in_several(name: str, precision: str, schedule: str, setting: Setting, **options: Any) -> Found:
    found: list[Found] = on_ranks(setting, PROCESSES, _on_one_rank, name, precision, schedule, options)
    return next((each for each in found if not each["ok"]), found[0])


def _on_one_rank(setting: Setting, rank: int, name: str, precision: str, schedule: str, options: Any) -> Found:
    make_repeatable(setting)
    if setting.device != "cpu":
        options = {"transport": "staged", **options}
    return prove(setting, name, precision, schedule, **options)


def _or_refused(name: str, schedule: str, run: Any) -> Found:
    """What cannot be kept equal is refused, here by name; any other refusal is a failure."""
    if name == "convnet" and schedule in TWO_COPIES:
        try:
            return {**run(), "ok": False, "says": "not refused, though each copy sees half of the batch"}
        except penstock.PartitionError as error:
            if "batch norm" not in str(error):
                raise
            return {"ok": True, "says": "refused, since each copy of the model would see half of the batch"}
    return run()


def prove(
    setting: Setting, name: str, precision: str, schedule: str, *, small: bool | None = None, **options: Any
) -> Found:
    """One proof: how many values are equal, how many to the bit, and the furthest from equal.

    `small`: with a model as small as for a stand-in; None: only there.
    """
    if setting.device == "standin" and precision != "float32":
        raise UnsupportedError("the stand-in has no kernels of its own in half precision")
    torch.manual_seed(0)
    made = MODELS[name](not setting.is_real if small is None else small)
    made = made.to(torch.bfloat16) if precision == "bf16" else made
    if setting.device == "standin" and name == "convnet":  # it converts no module to double precision there
        options = {"full_batch": False, **options}
    with context(setting, precision):
        report = penstock.verify(
            made.model,
            made.args,
            made.kwargs,
            target=made.target,
            loss_fn=_scaled(made.loss) if precision == "fp16" else made.loss,
            schedule=schedule,
            microbatches=MICROBATCHES,
            devices=setting.device,
            **options,
        )
        shares = _split_shares(setting, made, schedule, options) if schedule_spec(schedule).splits_backward else {}
    furthest = max(report.rows, key=lambda row: row.max_difference / max(row.max_reference, 1e-30))
    # A stage of `skips` has only a tied weight; what is recomputed in segments does not wait, nor do the stand-in's.
    waits = name != "skips" and not isinstance(options.get("recompute"), int) and setting.device != "standin"
    is_split = not waits or min(shares.values(), default=1.0) > MIN_SHARE
    is_compared = report.full_batch is None or report.full_batch.verdict != "missing"
    return {
        "ok": report.ok and is_split and is_compared,
        "says": report.summary() + ("" if is_split else f"; waiting for W, by stage: {shares}"),
        "split_share": shares,
        "values": len(report.rows),
        "equal_to_the_bit": sum(row.verdict == "equal" for row in report.rows),
        "furthest": f"{furthest.kind} {furthest.name}",
        "furthest_relative": furthest.max_difference / max(furthest.max_reference, 1e-30),
        "notes": list(report.notes),
    }


def _split_shares(setting: Setting, made: Model, schedule: str, options: dict[str, Any]) -> dict[int, float]:
    """For each stage of this process how much of its backward waits for W; verification does not show that."""
    options = {name: value for name, value in options.items() if name != "full_batch"} | {"schedule": schedule}
    options |= {"loss_fn": made.loss, "microbatches": MICROBATCHES, "devices": setting.device}
    with penstock.pipeline(made.model, made.args, made.kwargs, **options) as pipe:
        pipe.step(*made.args, target=made.target, **made.kwargs)
        return pipe.deferred_weight_grad_fraction


def context(setting: Setting, precision: str) -> AbstractContextManager[Any]:
    """What a step runs in."""
    if precision not in ("autocast", "fp16"):
        return nullcontext()
    return torch.autocast(setting.device, dtype=torch.bfloat16 if precision == "autocast" else torch.float16)


def _scaled(loss: Any) -> Any:
    """A loss function that reaches nothing of the model: `verify` refuses one that does."""

    def scaled(output: Any, target: Any) -> Tensor:
        return loss(output, target) * SCALE  # type: ignore[no-any-return]

    return scaled


def make_repeatable(setting: Setting) -> None:
    """The same kernels in the pipeline and in what judges it, without sums in the order in which threads come."""
    if setting.is_real:
        torch.backends.cudnn.allow_tf32 = False
        torch.use_deterministic_algorithms(True, warn_only=True)
