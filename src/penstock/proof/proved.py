"""`verify` as a state of pipelines: what has passed is remembered, and `pipeline(..., verify=True)` passes first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import wraps
from typing import Any, ParamSpec

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from penstock.pipe import verified
from penstock.pipe.options import Options
from penstock.pipe.pipeline import Pipeline
from penstock.proof import verify as verification
from penstock.proof.comparison import Report
from penstock.proof.twins import twins
from penstock.trees import map_tensors

P = ParamSpec("P")

_DECIDED = ("loss_fn", "cuts", "balance", "memory_limit", "link", "seed", "run")
"""The options that the pipeline to verify has decided, or that do not concern what it computes."""


def _remembered(verify: Callable[P, Report]) -> Callable[P, Report]:
    """The same function, after which pipelines like the one that passed are verified."""
    run: Callable[..., Report] = verify

    @wraps(verify)
    def remembering(*args: P.args, **options: P.kwargs) -> Report:
        report = run(*args, verify=False, **options)
        marks = [note for note in report.notes if isinstance(note, verified.Unverified)]
        if report.ok:
            verified.passed.update(mark.fingerprint for mark in marks)
        return replace(report, notes=tuple(note for note in report.notes if note not in marks))

    return remembering


verify = _remembered(verification.verify)


def first_step(model: nn.Module, loss_fn: Any, mesh: DeviceMesh | None) -> Callable[..., None]:
    """What verifies a pipeline with the batch of its first step, on copies of the model and its loss, made now.

    Every rank calls it, with the pipeline and the batch. It raises VerificationError on all of them if a value differs.
    """
    copy = twins(model, loss_fn)[1]

    def verify_with(pipe: Pipeline, args: Any, kwargs: Any, target: Any) -> None:
        trains = {name: parameter.requires_grad for name, parameter in pipe.model.named_parameters()}
        for name, parameter in copy.model.named_parameters():
            parameter.requires_grad_(trains[name])
        if not pipe.world.is_local:
            args, kwargs, target = _given_to_all(pipe, args, kwargs, target)
        names = [field.name for field in fields(Options) if field.init and field.name not in _DECIDED]
        options: dict[str, Any] = {name: getattr(pipe.session.options, name) for name in names}
        options |= {"schedule": pipe.session.order, "ranks": pipe.world.ranks, "mesh": mesh, "cuts": pipe.cuts}
        options |= {"target": target, "loss_fn": copy.loss, "seed": pipe.seed, "whole_batch": False}
        verify(copy.model, args, kwargs, **options).check()

    return verify_with


def _given_to_all(pipe: Pipeline, args: Any, kwargs: Any, target: Any) -> tuple[Any, Any, Any]:
    """The batch of this replica, from those of its processes that read it."""
    mine = ((args, kwargs) if pipe.needs_inputs else None, target if pipe.needs_targets else None)
    there = map_tensors(lambda x: x.detach().cpu().requires_grad_(x.requires_grad), mine)
    line = pipe.session.engine.control.gather_line(there)
    args, kwargs = next(inputs for inputs, _ in line if inputs is not None)
    return args, kwargs, next((label for _, label in line if label is not None), None)
