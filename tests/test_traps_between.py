"""Traps of what goes on between stages, and of schedules; the others are in test_traps.py."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import ArgumentError, ScheduleError, ShapeError, VerificationError, pipeline, verify
from penstock.runtime.transport.routes import LocalChannel
from penstock.schedule import Action, Op, Placement, Schedule
from scaffolding.by_hand import assert_same_gradients, sizes_by_hand, step_by_hand
from scaffolding.models import Forward, InPlace, OneLayer, SkipsTwice, squared_error
from scaffolding.proofs import after_each_step, proven
from scaffolding.small import ROWS, WIDTH, batch, mlp

# -- 5, 10, 18: what is between stages --------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_trap_5_batches_of_other_sizes_run_as_they_are(schedule: str) -> None:
    """Larger, smaller, one row alone; each to the bit, with nothing of the one before in it."""
    model = mlp()
    reference = copy.deepcopy(model)
    with pipeline(model, batch()[:1], ranks=3, schedule=schedule, microbatches=3, loss=squared_error) as pipe:
        for rows in (11, 1, 12, 2, 11):
            x, y = batch(rows)
            model.zero_grad()
            reference.zero_grad()
            expected = step_by_hand(reference, (x,), y, squared_error, min(3, rows))
            result = pipe.step(x, target=y, outputs=True)
            assert result.sizes == tuple(sizes_by_hand(rows, min(3, rows)))
            assert torch.equal(result.loss, expected.total)
            assert all(map(torch.equal, result.outputs, expected.outputs))
            assert_same_gradients(model, reference)
            assert torch.equal(pipe.evaluate(x, target=y).loss, expected.total)


def test_trap_5_a_target_of_another_size_is_refused_and_the_next_one_runs() -> None:
    model, (x, y) = mlp(), batch()
    reference = copy.deepcopy(model)
    with pipeline(model, (x,), ranks=3, microbatches=3, loss=squared_error) as pipe:
        with pytest.raises(ShapeError, match=r"target has 10 rows .*expected 11, as the inputs have"):
            pipe.step(x, target=y[:10])
        with pytest.raises(ArgumentError, match="the batch has no rows"):
            pipe.step(x[:0], target=y[:0])
        assert all(p.grad is None for p in model.parameters())
        pipe.step(x, target=y)
    step_by_hand(reference, (x,), y, squared_error, 3)
    assert_same_gradients(model, reference)


class Changing(nn.Module):
    """Returns what `change` makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.change: Callable[[Tensor], Tensor] = torch.clone

    def forward(self, x: Tensor) -> Tensor:
        return self.change(x)


def turned(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


@pytest.mark.parametrize(
    ("change", "given"),
    [
        (Tensor.double, "float64[4, 9]"),
        (lambda x: x[:2].clone(), "float32[2, 9]"),
        (turned, "strides [1, 4]"),
    ],
    ids=["dtype", "shape", "strides"],
)
def test_trap_5_the_sender_refuses_a_value_that_has_changed(
    change: Callable[[Tensor], Tensor], given: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing, (x, y) = Changing(), batch()
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), changing, nn.Linear(WIDTH, WIDTH))
    received: list[int] = []
    receive = LocalChannel.receive
    monkeypatch.setattr(LocalChannel, "receive", lambda self, k: (received.append(k), receive(self, k))[1])
    with pipeline(model, (x,), ranks=2, cuts=["2"], microbatches=3, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        received.clear()
        changing.change = change
        with pytest.raises(ShapeError) as caught:
            pipe.step(x, target=y)
        for part in ("of stage 0", "from stage 0 to 1 in microbatch 0", given, "float32[4, 9]", "Nothing was sent"):
            assert part in str(caught.value)
        assert not received
        assert any("0SEND_F" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_trap_10_at_most_two_receives_of_a_link_are_posted(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: Counter[int] = Counter()
    most: defaultdict[int, int] = defaultdict(int)
    post, receive = LocalChannel.post, LocalChannel.receive

    def posting(self: LocalChannel, microbatch: int) -> None:
        open_now[id(self)] += 1
        most[id(self)] = max(most[id(self)], open_now[id(self)])
        post(self, microbatch)

    def receiving(self: LocalChannel, microbatch: int) -> Any:
        open_now[id(self)] -= 1
        assert open_now[id(self)] >= 0, "received before it was posted"
        return receive(self, microbatch)

    monkeypatch.setattr(LocalChannel, "post", posting)
    monkeypatch.setattr(LocalChannel, "receive", receiving)
    x, y = torch.randn(16, 7), torch.randn(16, 7)
    with pipeline(SkipsTwice(7), (x,), ranks=4, schedule=schedule, microbatches=16, loss=squared_error) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
    assert len(most) > 6  # the skips have links of their own
    assert max(most.values()) <= 2
    assert set(open_now.values()) == {0}


@pytest.mark.parametrize(
    ("schedule", "ranks", "chunks"), [("gpipe", 4, 1), ("zb-h1", 3, 1), ("gpipe", 1, 3), ("gpipe", 2, 2)]
)
def test_trap_18_updates_in_place_of_what_another_stage_made(schedule: str, ranks: int, chunks: int) -> None:
    """On another rank, which sent it, or on the same."""
    x, y = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
    proven(InPlace(), x, y, ranks=ranks, stages_per_rank=chunks, microbatches=3, schedule=schedule, exact=True)


# -- 7, 9, 13: schedules ----------------------------------------------------------------------------------------------


def backwards_first_last(ranks: int, microbatches: int) -> Schedule:
    """Legal, but runs the microbatches in descending order."""
    rows = [
        [Action(rank, op, k) for op in (Op.F, Op.B) for k in reversed(range(microbatches))] for rank in range(ranks)
    ]
    return Schedule("descending", Placement.loop(ranks), microbatches, rows)


@pytest.mark.parametrize("schedule", ["1f1b", backwards_first_last(3, 5)], ids=["1f1b", "descending"])
def test_trap_7_losses_and_outputs_in_order_of_microbatch(schedule: str | Schedule) -> None:
    model, (x, y) = mlp(), batch()
    expected = step_by_hand(copy.deepcopy(model), (x,), y, squared_error, 5)
    with pipeline(model, (x,), ranks=3, microbatches=5, schedule=schedule, loss=squared_error) as pipe:
        for result in (pipe.step(x, target=y, outputs=True), pipe.evaluate(x, target=y, outputs=True)):
            assert all(map(torch.equal, result.losses, expected.losses))
            assert all(map(torch.equal, result.outputs, expected.outputs))
            assert len(result.losses) == len(result.outputs) == 5
            assert torch.equal(result.loss, expected.total)
            assert not any(t.requires_grad for t in (*result.losses, *result.outputs, result.loss))


F00, F01, B00, B01 = (Action(0, op, k) for op in (Op.F, Op.B) for k in (0, 1))
F10, F11, B10, B11 = (Action(1, op, k) for op in (Op.F, Op.B) for k in (0, 1))
FINE = [F10, B10, F11, B11]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[F00, F01, B00, B01, B01], FINE], "rank 0 .*0B1"),
        ([[F00, F01, B00], FINE], "rank 0 has no 0B1"),
        ([[F00, F01, B00, B01, Action(0, Op.F, 2)], FINE], "rank 0 has 0F2"),
        ([[F00, F01, B00, B01, F10], FINE], "rank 0 has 1F0"),
        ([[F00, B00, F01, B01], [F10, F11, B10, B11]], "rank"),
        ([[B00, F00, F01, B01], FINE], "0B0"),
    ],
    ids=["repeated", "missing", "out of range", "misplaced", "deadlock", "order"],
)
def test_trap_9_illegal_schedules_are_refused(rows: list[list[Action]], words: str) -> None:
    x, _ = batch(2)
    schedule = Schedule("mine", Placement.loop(2), 2, rows)
    with pytest.raises(ScheduleError, match=words):
        pipeline(mlp(), (x,), ranks=2, microbatches=2, schedule=schedule, loss=squared_error)


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 4), ("zb-h2", 3)])
def test_trap_13_skips_over_several_cuts(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 7), torch.randn(ROWS, 7)
    proven(SkipsTwice(7), x, y, ranks=ranks, microbatches=5, schedule=schedule, exact=True)


# -- 14, 15: structures, and gradients that are not there -------------------------------------------------------------


class Dicts(OneLayer):
    """Takes and returns a dict of tensors, whole numbers, flags and text."""

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        assert values["text"] == "word"
        x = self.layer(values["x"]) * values["factor"] + values["offset"]
        return {**values, "x": x if values["flag"] else -x, "nested": (x.tanh(), [values["factor"]])}


def dict_loss(output: dict[str, Any], target: dict[str, Any]) -> Tensor:
    assert output["nested"][1] == [2]
    assert target["power"] == 2
    return (output["x"] - target["a"]["b"]).abs().pow(target["power"]).mean() + output["nested"][0].mean()


@pytest.mark.parametrize(("schedule", "ranks"), [("1f1b", 3), ("zb-h1", 2)])
def test_trap_14_dicts_numbers_and_text_between_stages_and_in_targets(schedule: str, ranks: int) -> None:
    x, y = batch()
    values = {"x": x, "factor": 2, "flag": False, "text": "word", "offset": torch.tensor(0.5)}
    target = {"a": {"b": y}, "power": 2}
    options: dict[str, Any] = {"microbatches": 4, "exact": True}
    proven(
        [Dicts(WIDTH), Dicts(WIDTH), Dicts(WIDTH)], values, target, dict_loss, ranks=ranks, schedule=schedule, **options
    )


def test_trap_15_a_pipeline_that_never_runs_backward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    monkeypatch.setattr("penstock.runtime.exact.rules.backward", lambda roots, grads: None)
    report = verify(mlp(), (x,), target=y, loss_fn=squared_error, ranks=1, microbatches=2)
    missing = [row.name for row in report.failures if row.verdict == "missing"]
    assert missing == [name for name, _ in mlp().named_parameters()]
    with pytest.raises(VerificationError, match=r"gradient 0\.weight on stage 0: missing in the pipeline"):
        report.raise_if_failed()


def test_trap_15_one_missing_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    after_each_step(monkeypatch, lambda pipe: setattr(dict(pipe.named_parameters())["3.bias"], "grad", None))
    report = verify(mlp(), (x,), target=y, loss_fn=squared_error, ranks=3, microbatches=2)
    assert [(row.name, row.verdict) for row in report.failures] == [("3.bias", "missing")]


def test_trap_15_a_gradient_that_should_not_be_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.layers(x) + 0 * self.spare.detach().sum()

    model, (x, y) = Forward(forward, layers=mlp(2), spare=nn.Parameter(torch.zeros(3))), batch()
    after_each_step(monkeypatch, lambda pipe: setattr(dict(pipe.named_parameters())["spare"], "grad", torch.zeros(3)))
    report = verify(model, (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=2)
    assert [(row.name, row.verdict) for row in report.failures] == [("spare", "unexpected")]
