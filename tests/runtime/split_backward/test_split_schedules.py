"""Schedules that split the backward give the bits of one device, wherever they put their W's; and defer what
can wait.

What a split backward costs is measured (benchmarks/split_backward).
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import pipeline
from penstock.pipe.pipeline import Pipeline
from penstock.schedule import Action, Op, Overlap, Schedule, check, generate, split_backward
from scaffolding.by_hand import assert_steps_by_hand
from scaffolding.model_kinds import EXAMPLES
from scaffolding.models import Forward, squared_error
from scaffolding.representatives import representatives
from scaffolding.small import WIDTH, batch, mlp

MICROBATCHES = 3


def with_late_weights(schedule: Schedule, late: int | None) -> Schedule:
    """The backward split, with each W behind the next `late` I's of its row; None: at the row's end."""
    rows = []
    for row in split_backward(schedule).rows:
        items: list[Action | Overlap] = []
        waiting: list[Action | Overlap] = []
        for item in row.items():
            if isinstance(item, Action) and item.op is Op.W:
                waiting.append(item)
            else:
                items.append(item)
            if late is not None and len(waiting) > late:
                items.append(waiting.pop(0))
        rows.append(items + waiting)
    return schedule.with_rows(rows)


@pytest.fixture(autouse=True)
def shares(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, float]]:
    """What every step reports to have put off."""
    found: list[dict[int, float]] = []
    step = Pipeline.step

    def seen_step(self: Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        found.append(self.deferred_weight_grad_fraction)
        return result

    monkeypatch.setattr(Pipeline, "step", seen_step)
    return found


def verify(name: str, schedule: Schedule) -> penstock.VerificationReport:
    torch.manual_seed(0)
    sizes = {"layers": max(4, schedule.placement.stages)} if name == "tied_gpt_with_dropout" else {}
    model, args, kwargs, target, loss = EXAMPLES[name](**sizes)
    options: dict[str, Any] = {"ranks": schedule.ranks, "schedule": schedule, "seed": 7, "exact": True}
    return penstock.verify(model, args, target=target, loss_fn=loss, kwargs=kwargs, **options)


# -- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "late"), representatives(3, list(EXAMPLES), [0, 1, None]))
def test_bits_of_one_device(name: str, late: int | None, shares: list[dict[int, float]]) -> None:
    schedule = with_late_weights(generate("1f1b", 3, MICROBATCHES), late)
    assert check(schedule) == []
    verify(name, schedule).raise_if_failed()
    of_split = next(share for share in shares if share)  # models with dropout are compared with a pipeline of one rank
    assert set(of_split) == {0, 1, 2}
    assert all(share > 0.9 for share in shares[1].values())


def test_overlapping_pairs_run_one_after_the_other() -> None:
    order = Schedule.parse(
        "pairs: 3 microbatches, stages on ranks 0 1\n"
        "rank 0: 0F0 0F1 (0F2;0B0)OVERLAP_F_B 0I1 0B2 0W1\n"
        "rank 1: 1F0 1B0 1F1 (1F2;1I1)OVERLAP_F_B 1W1 1B2"
    )
    assert {violation.kind for violation in check(order)} == {"inexact"}
    order = Schedule.parse(str(order).replace("0B2 0W1", "0W1 0B2"))
    assert check(order) == []
    verify("skips", order).raise_if_failed()


def test_some_stages_split_and_others_not() -> None:
    order = Schedule.parse(
        "by hand: 3 microbatches, stages on ranks 0 1\n"
        "rank 0: 0F0 0F1 0F2 0B0 0B1 0B2\n"
        "rank 1: 1F0 1F1 1F2 1I0 1I1 1W0 1W1 1B2"
    )
    x, y = batch()
    with penstock.pipeline(mlp(), (x,), ranks=2, schedule=order, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        share = WIDTH / (WIDTH + 1)
        assert pipe.deferred_weight_grad_fraction == {1: pytest.approx(share)}
        pipe.evaluate(x, target=y)
        assert pipe.deferred_weight_grad_fraction == {1: pytest.approx(share)}
    assert verify("mlp", order).ok


# -- what waits --------------------------------------------------------------------------------------------------------


def test_trap_16_all_weights_of_linear_layers_wait_for_w() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(7, 7, bias=False), nn.Tanh())))
    x, target = torch.randn(8, 7), torch.randn(8, 7)
    with pipeline(
        model, (x,), ranks=2, microbatches=4, schedule="zb-h1", loss=nn.functional.mse_loss
    ) as pipe:  # fmt: skip
        pipe.step(x, target=target)
        assert pipe.deferred_weight_grad_fraction == {0: 1.0, 1: 1.0}


class Trims(nn.Module):
    """Trims padding, so that the strides of a linear layer's input, and so its operators, differ by microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.last(self.first(x[:, : int(lengths.max())]).tanh()).sum(1)


def test_a_layer_that_runs_otherwise_in_a_later_microbatch_waits_for_w_as_a_whole() -> None:
    torch.manual_seed(0)
    parts = {"embed": nn.Embedding(9, 6), "block": Trims(), "last": nn.Linear(6, 6)}
    model = Forward(lambda self, ids, lengths: self.last(self.block(self.embed(ids), lengths)), **parts)
    ids, target = torch.randint(0, 9, (8, 5)), torch.randn(8, 6)
    lengths = torch.tensor([5, 5, 3, 2, 5, 4, 4, 4])
    reference = copy.deepcopy(model)
    with pipeline(
        model, (ids, lengths), ranks=2, microbatches=4, schedule="zb-h1", loss=squared_error, cuts=["last"]
    ) as pipe:
        assert_steps_by_hand(pipe, reference, [(ids, lengths, target)] * 2, squared_error, 4)
        assert pipe.deferred_weight_grad_fraction[0] > 0.9
