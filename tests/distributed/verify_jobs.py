"""What the ranks run to find out whether `verify` sees what goes wrong on one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jobs import TASKS

import penstock


class Found(NamedTuple):
    """What was reported: of each row that is not as promised, its kind, name, verdict and step."""

    ok: bool
    summary: str
    wrong: list[tuple[str, str, str, int]]


def _gradient(pipe: penstock.Pipeline, name: str) -> None:
    grad = dict(pipe.named_parameters())[name].grad
    assert grad is not None
    grad.view(-1)[0] += 1.0


def _no_gradient(pipe: penstock.Pipeline, name: str) -> None:
    dict(pipe.named_parameters())[name].grad = None


def _buffer(pipe: penstock.Pipeline, name: str) -> None:
    dict(pipe.named_buffers())[name].view(-1)[0] += 1


SPOILS: dict[str, Callable[[penstock.Pipeline, str], None]] = {
    "gradient": _gradient,
    "no gradient": _no_gradient,
    "buffer": _buffer,
}


def verify(rank: int, task: str, what: str, name: str) -> Found:
    """Spoils what is called `name` on rank 1 alone, after each step."""
    made, step = TASKS[task](), penstock.Pipeline.step

    def spoiled(pipe: penstock.Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(pipe, *args, **kwargs)
        if rank == 1:
            SPOILS[what](pipe, name)
        return result

    penstock.Pipeline.step = spoiled  # type: ignore[method-assign]
    try:
        report = penstock.verify(made.model, made.args, target=made.target, loss_fn=made.loss, microbatches=3)
    finally:
        penstock.Pipeline.step = step  # type: ignore[method-assign]
    return Found(report.ok, report.summary(), [(r.kind, r.name, r.verdict, r.step) for r in report.failures])
