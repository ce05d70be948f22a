"""What would train nothing, or something else than the model on one device, is refused or followed; never silent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, Microbatches, PartitionError, ScheduleError, ShapeError, pipeline
from penstock.schedule import Action, Op, drop_backward, forward_only, generate, reduce_ties
from scaffolding.models import squared_error
from scaffolding.small import batch, mlp


@pytest.mark.parametrize("without", [forward_only, lambda schedule: drop_backward(schedule, [0])])
def test_schedule_that_leaves_a_stage_untrained_is_refused(without: Any) -> None:
    x, _ = batch()
    with pytest.raises(ScheduleError, match=r"no backward for stage 0.*freeze"):
        pipeline(mlp(), (x,), ranks=2, schedule=without(generate("gpipe", 2, 4)), loss=squared_error)


def test_loss_without_a_gradient_is_refused() -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=2, loss=lambda o, t: squared_error(o, t).detach()) as pipe:
        with pytest.raises(ArgumentError, match="takes no gradient"):
            pipe.step(x, target=y)


def test_frozen_model_has_nothing_to_train_and_runs() -> None:
    x, y = batch()
    model = mlp().requires_grad_(False)
    with pipeline(model, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        with pytest.warns(UserWarning, match="no parameter and no input of the model requires a gradient"):
            assert pipe.step(x, target=y).loss > 0
        assert not any(action.op is Op.B for row in pipe.schedule.rows for action in row)


def test_schedule_that_was_run_before_can_be_given_again() -> None:
    x, y = batch()
    order = reduce_ties(generate("1f1b", 2, 4), [(0, 1)])
    assert any(action.op is Op.REDUCE_GRAD for row in order.rows for action in row)
    with pipeline(mlp(), (x,), ranks=2, schedule=order, loss=squared_error) as pipe:
        again = pipe.schedule
    with pipeline(mlp(), (x,), ranks=2, schedule=again, loss=squared_error) as pipe:
        assert pipe.step(x, target=y).loss > 0


def test_descending_order_is_noted_as_inexact() -> None:
    x, _ = batch()
    order = generate("gpipe", 1, 4)
    row = [Action(0, Op.F, k) for k in range(4)] + [Action(0, Op.B, k) for k in (3, 2, 1, 0)]
    with pipeline(mlp(), (x,), ranks=1, schedule=order.with_rows([row]), loss=squared_error) as pipe:
        (note,) = [note for note in pipe.notes if "ascending" in note]
    assert note.startswith("rank 0 has 0B2 after 0B3: ")
    assert note.endswith(" (and 2 more)")


@pytest.mark.parametrize("norm_type", [2.0, 1, 3.5, float("inf"), "inf"])
@pytest.mark.parametrize("max_norm", [0.01, 1e6])
def test_clipping_is_that_of_one_device(max_norm: float, norm_type: Any) -> None:
    x, y = batch()
    model = mlp()
    with pipeline(model, (x,), ranks=3, microbatches=2, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        reference = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        expected = [nn.Parameter(torch.zeros_like(grad)) for grad in reference]
        for parameter, grad in zip(expected, reference, strict=True):
            parameter.grad = grad
        norm = pipe.clip_grad_norm_(max_norm, norm_type, foreach=False)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(expected, max_norm, norm_type))
        for parameter, other in zip(model.parameters(), expected, strict=True):
            assert parameter.grad is not None
            assert other.grad is not None
            assert torch.equal(parameter.grad, other.grad)


def test_the_kind_of_timeline_is_checked() -> None:
    x, y = batch()
    with (
        pipeline(mlp(), (x,), ranks=2, microbatches=2, loss=squared_error) as pipe,
        pytest.raises(ArgumentError, match="timeline='yes': expected True or False"),
    ):
        pipe.step(x, target=y, timeline="yes")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_norm": "much"}, "max_norm='much': expected a number of at least 0"),
        ({"max_norm": mlp().parameters()}, "the parameters are the pipeline's, and are not passed"),
        ({"max_norm": True}, "max_norm=True"),
        ({"max_norm": None}, "max_norm=None"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"max_norm": 1.0, "norm_type": "two"}, "norm_type='two'"),
        ({"max_norm": 1.0, "error_if_nonfinite": None}, "error_if_nonfinite=None: expected True or False"),
        ({"max_norm": 1.0, "foreach": "yes"}, "foreach='yes': expected True, False or None"),
    ],
)
def test_arguments_of_clipping_are_checked(given: dict[str, Any], words: str) -> None:
    with (
        pipeline(mlp(), batch()[:1], ranks=2, microbatches=2, loss=squared_error) as pipe,
        pytest.raises(ArgumentError, match=words),
    ):
        pipe.clip_grad_norm_(**given)


def test_a_norm_that_is_not_finite() -> None:
    (x, y), model = batch(), mlp()
    with pipeline(model, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        first = next(pipe.parameters())
        assert first.grad is not None
        first.grad[0, 0] = torch.inf
        before = [p.grad.clone() for p in pipe.parameters() if p.grad is not None]
        with pytest.raises(RuntimeError, match=r"norm of order 2 is non-finite \(inf\)"):
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        assert all(
            torch.equal(p.grad, was) for p, was in zip(pipe.parameters(), before, strict=True) if p.grad is not None
        )
        assert pipe.clip_grad_norm_(1.0).isinf()


def norms() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Linear(5, 5))


CUT = "in training, and 4 rows in 2 microbatches are 3, 1: pass a larger batch, fewer microbatches, or"


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (torch.randn(1, 5), "in training, and the batch has one: pass a larger batch"),
        (Microbatches(torch.randn(4, 5).split([3, 1])), CUT),
    ],
)
def test_one_row_and_batch_norm(inputs: Any, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        pipeline(norms(), (inputs,), ranks=2, microbatches=4, loss=squared_error)
    with pytest.raises(PartitionError, match=words):
        penstock.inspect(norms(), (inputs,), microbatches=4)
    assert penstock.inspect(norms(), (torch.randn(5, 5),), microbatches=4).microbatches == 2


def test_inspect_refuses_a_batch_that_cannot_be_cut() -> None:
    x, _ = batch()
    args = (x, x[:-1])
    with pytest.raises((ArgumentError, ShapeError)) as cut:
        pipeline(mlp(), args, ranks=2, microbatches=len(x) + 1, loss=squared_error)
    with pytest.raises(type(cut.value)) as seen:
        penstock.inspect(mlp(), args, microbatches=len(x) + 1)
    assert str(seen.value) == str(cut.value)
    with pytest.raises(ArgumentError, match="microbatches=0"):
        penstock.inspect(mlp(), (x,), microbatches=0)


class Detaches(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.detach() + self.bias if x.abs().max() > 50 else y


def test_a_gradient_that_comes_now_and_then_is_refused_in_words_of_its_own() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5), torch.randn(4, 5)
    model = nn.Sequential(nn.Linear(5, 5), Detaches(5, 5))
    with pipeline(model, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        with pytest.raises(ShapeError, match=r"there was one in the first step, and there is none now.*torch\.where"):
            pipe.step(x * 1000, target=y)
