"""What is wrong on one rank alone is in every rank's report; of a tie, too, whose other copy is as it should be."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest

import penstock
from distributed.jobs import TASKS
from scaffolding.proofs import after_each_step
from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


class Found(NamedTuple):
    """What was reported: of each row that is not as promised, its kind, name, verdict and step."""

    ok: bool
    summary: str
    wrong: list[tuple[str, str, str, int]]


def _no_gradient(pipe: penstock.Pipeline, name: str) -> None:
    dict(pipe.named_parameters())[name].grad = None


def _buffer(pipe: penstock.Pipeline, name: str) -> None:
    dict(pipe.named_buffers())[name].view(-1)[0] += 1


SPOILS: dict[str, Callable[[penstock.Pipeline, str], None]] = {
    "no gradient": _no_gradient,
    "buffer": _buffer,
}


def verify(rank: int, task: str, what: str, name: str) -> Found:
    """Spoils what is called `name` on rank 1 alone, after each step."""
    made = TASKS[task]()
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            after_each_step(patch, lambda pipe: SPOILS[what](pipe, name))
        report = penstock.verify(made.model, made.args, target=made.target, loss_fn=made.loss, microbatches=3)
    return Found(report.ok, report.summary(), [(r.kind, r.name, r.verdict, r.step) for r in report.failures])


@pytest.mark.parametrize(
    ("task", "what", "row"),
    [
        ("tied_gpt", "no gradient", ("gradient", "wte.weight", "missing", 1)),
        ("convnet", "buffer", ("buffer", "norm.running_mean", "different", 1)),
    ],
)
def test_what_one_rank_has_wrong_is_in_every_report(
    ranks2: Ranks, task: str, what: str, row: tuple[str, str, str, int]
) -> None:
    seen = ranks2.run(verify, task, what, row[1])
    assert seen[0] == seen[1], "each rank has the same report"
    assert not seen[0].ok
    in_steps = [wrong for wrong in seen[0].wrong if not wrong[1].endswith(" in evaluation")]
    assert in_steps == [row]
    assert (len(seen[0].wrong) > 1) == (what == "buffer"), "an evaluation after the second step reads the buffer"
    assert f"the first is {row[0]} {row[1]} on stage" in seen[0].summary
