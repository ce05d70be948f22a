"""One test for each thing that others get wrong (the list in docs/design.md); those that need processes are in
tests/distributed.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import assert_same_gradients, sizes_by_hand, step_by_hand
from models import GPT, ConvNet, InPlace, SkipsTwice, squared_error, token_error
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock import ArgumentError, PartitionError, ScheduleError, ShapeError, VerificationError, pipeline, verify
from penstock.runtime.local import LocalChannel
from penstock.runtime.stage import StageRunner
from penstock.schedule import Action, Op, Placement, Schedule, generate, names

ROWS, WIDTH = 11, 9


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def mlp(layers: int = 6, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def batch(rows: int = ROWS, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, width, generator=generator), torch.randn(rows, width, generator=generator)


def tokens(vocabulary: int = 19) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, vocabulary, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1].clone(), ids[:, 1:].clone()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


# -- 1 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_trap_1_tied_weights(ranks: int) -> None:
    torch.manual_seed(0)
    model = GPT()
    reference = copy.deepcopy(model)
    ids, target = tokens()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with pipeline(model, (ids,), ranks=ranks, microbatches=3, loss=token_error) as pipe:
        assert any("wte.weight" in stage.parameters for stage in pipe.stages[1:])
        for _ in range(3):
            pipe.step(ids, target=target)
            step_by_hand(reference, (ids,), target, token_error, 3)
            torch.testing.assert_close(model.wte.weight.grad, reference.wte.weight.grad, rtol=1e-5, atol=1e-7)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for a, b in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


# -- 2, 3, 12, 21: means, sums, weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", names())
def test_trap_2_gradients_accumulate_over_steps_and_evaluation_leaves_them_alone(schedule: str) -> None:
    model, (x, y) = mlp(), batch()
    reference = copy.deepcopy(model)
    with pipeline(model, (x,), ranks=3, schedule=schedule, microbatches=4, loss=squared_error) as pipe:
        for step in range(3):
            pipe.step(x + step, target=y)
            step_by_hand(reference, (x + step,), y, squared_error, 4)
            before = gradients(model)
            pipe.evaluate(x, target=y)
            pipe.evaluate(x)
            for name, parameter in model.named_parameters():
                assert torch.equal(parameter.grad, before[name]), name
    assert_same_gradients(model, reference)


@pytest.mark.parametrize("microbatches", [1, 2, 3, 8, 11])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_trap_3_the_loss_of_the_whole_batch(reduction: str, microbatches: int) -> None:
    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target, reduction=reduction)

    model, (x, y) = mlp(), batch()
    whole = copy.deepcopy(model)
    expected = loss(whole(x), y)
    expected.backward()
    with pipeline(model, (x,), ranks=2, microbatches=microbatches, loss=loss, reduction=reduction) as pipe:
        result = pipe.step(x, target=y)
        assert result.loss.shape == ()
        torch.testing.assert_close(result.loss, expected.detach())
        assert len(result.losses) == microbatches
        torch.testing.assert_close(pipe.evaluate(x, target=y).loss, expected.detach())
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad)


@pytest.mark.parametrize("schedule", names())
@pytest.mark.parametrize("rows", [2, 7])
def test_trap_12_fewer_microbatches_than_ranks_and_batches_that_do_not_divide(schedule: str, rows: int) -> None:
    x, y = batch(rows)
    report = verify(mlp(), (x,), y, squared_error, ranks=4, microbatches=2, schedule=schedule, exact=True)
    assert report.ok, report.summary()


def count(target: Tensor) -> Tensor:
    return (target != -100).sum()


def masked_tokens() -> tuple[Tensor, Tensor]:
    ids, target = tokens()
    target[0, 1:] = target[4:7] = -100
    return ids, target


@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 11])
def test_trap_21_masked_targets(microbatches: int) -> None:
    """With 4 and 11 microbatches, one holds no token that counts at all: its own mean is NaN."""
    torch.manual_seed(0)
    model, (ids, target) = GPT(), masked_tokens()
    whole = copy.deepcopy(model)
    expected = token_error(whole(ids), target)
    expected.backward()
    with pipeline(model, (ids,), ranks=3, microbatches=microbatches, loss=token_error, reduction=count) as pipe:
        torch.testing.assert_close(pipe.step(ids, target=target).loss, expected.detach())
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def masked_mean(output: Tensor, target: Tensor) -> Tensor:
    """Whose gradient is NaN, too, where nothing counts."""
    keep = (target != -100).flatten()
    losses = F.cross_entropy(output.flatten(0, 1), target.flatten().clamp(min=0), reduction="none")
    return (losses * keep).sum() / keep.sum()


@pytest.mark.parametrize("schedule", names())
def test_trap_21_a_microbatch_in_which_nothing_counts(schedule: str) -> None:
    torch.manual_seed(0)
    model, (ids, target) = GPT(), masked_tokens()
    whole = copy.deepcopy(model)
    masked_mean(whole(ids), target).backward()
    report = verify(
        model, (ids,), target, masked_mean, ranks=2, microbatches=11, reduction=count, schedule=schedule, exact=True
    )
    assert report.ok, report.summary()
    for a, b in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7)


def test_trap_21_nothing_counts_in_the_whole_batch() -> None:
    ids, target = tokens()
    with pipeline(GPT(), (ids,), ranks=2, microbatches=2, loss=token_error, reduction=count) as pipe:
        with pytest.raises(ArgumentError, match=r"reduction: the weights .* are \[0.0, 0.0\]"):
            pipe.step(ids, target=torch.full_like(target, -100))


# -- 4, 6, 8: building leaves no trace; modes; weights ----------------------------------------------------------------


def test_trap_4_recording_counts_no_batch_in_batch_norm() -> None:
    torch.manual_seed(0)
    model, images, target = ConvNet(), torch.randn(ROWS, 3, 6, 6), torch.randn(ROWS, 3)
    reference = copy.deepcopy(model)
    state = torch.get_rng_state()
    with pipeline(model, (images,), ranks=3, microbatches=3, loss=squared_error) as pipe:
        for (name, a), (_, b) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
            assert torch.equal(a, b), name
        pipe.step(images, target=target)
        step_by_hand(reference, (images,), target, squared_error, 3)
        pipe.evaluate(images, target=target)
        for (name, a), (_, b) in zip(model.named_buffers(), reference.named_buffers(), strict=True):
            assert torch.equal(a, b), name
        assert model.norm.num_batches_tracked == 3
        assert all(module.training for module in model.modules())
    assert_same_gradients(model, reference)
    assert torch.equal(torch.get_rng_state(), state)


def test_trap_4_evaluation_in_training_mode_buffers_are_restored() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1  # in evaluation as well
            return self.inner(x)

    model, (x, y) = nn.Sequential(Counting(), Counting(), nn.Linear(WIDTH, WIDTH)), batch()
    with pipeline(model, (x,), ranks=2, microbatches=4, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        assert model[0].count == model[1].count == 4
        pipe.evaluate(x, target=y)
        assert model[0].count == model[1].count == 4


def test_trap_6_eval_switches_dropout_off() -> None:
    torch.manual_seed(0)
    model, (ids, target) = GPT(dropout=0.4), tokens()  # in blocks, and between them
    plain = copy.deepcopy(model).eval()
    with pipeline(model, (ids,), ranks=3, microbatches=2, loss=token_error) as pipe:
        expected = torch.cat([plain(part.clone()) for part in torch.split(ids, sizes_by_hand(ROWS, 2))])

        def output() -> Tensor:
            return torch.cat(pipe.step(ids, target=target, outputs=True).outputs)

        assert not torch.allclose(output(), expected)
        assert torch.equal(torch.cat(pipe.evaluate(ids, outputs=True).outputs), expected)
        assert pipe.eval() is pipe
        assert torch.equal(output(), expected)
        pipe.train()
        one, other = output(), output()
        assert not torch.allclose(one, expected)
        assert not torch.allclose(one, other)  # each step has its own masks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_trap_8_weights_do_not_depend_on_the_number_of_ranks(ranks: int) -> None:
    model, (x, _) = mlp(), batch()
    expected = copy.deepcopy(model.state_dict())
    with pipeline(model, (x,), ranks=ranks, loss=squared_error) as pipe:
        weights = dict(pipe.named_parameters())
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert len({weight.detach().numpy().tobytes() for weight in weights.values()}) == len(weights)  # none is alike


# -- 5, 10, 18: what is between stages --------------------------------------------------------------------------------


def test_trap_5_a_batch_of_another_size_is_refused_and_the_next_one_runs() -> None:
    model, (x, y) = mlp(), batch()
    reference = copy.deepcopy(model)
    with pipeline(model, (x,), ranks=3, microbatches=3, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        model.zero_grad()
        for rows in (1, 10, 12):
            with pytest.raises(ShapeError, match=rf"input.* has {rows} rows .*expected 11"):
                pipe.step(*batch(rows)[:1], target=batch(rows)[1])
        with pytest.raises(ShapeError, match=r"target has 10 rows .*expected 11"):
            pipe.step(x, target=y[:10])
        with pytest.raises(ShapeError, match="float64"):
            pipe.step(x.double(), target=y)
        with pytest.raises(ShapeError, match=r"\(4, 5\)"):
            pipe.step(x[:, :5], target=y)
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


@pytest.mark.parametrize(
    ("change", "given"),
    [(Tensor.double, "float64[4, 9]"), (lambda x: x[:2].clone(), "float32[2, 9]"), (lambda x: x.t().clone().t(), "[1, ")],
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
        assert caught.value.__notes__ == ["penstock: in action 0SEND_F0_TO1" if False else caught.value.__notes__[0]]
        assert "0SEND_F" in caught.value.__notes__[0]


@pytest.mark.parametrize("schedule", names())
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", names())
def test_trap_18_updates_in_place_of_what_was_received(schedule: str, ranks: int) -> None:
    x, y = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
    report = verify(InPlace(), (x,), y, squared_error, ranks=ranks, microbatches=3, schedule=schedule, exact=True)
    assert report.ok, report.summary()


@pytest.mark.parametrize("chunks", [2, 3])
def test_trap_18_updates_in_place_of_what_a_stage_of_the_same_rank_made(chunks: int) -> None:
    x, y = torch.randn(ROWS, 6), torch.randn(ROWS, 6)
    for ranks in (1, 2):
        report = verify(
            InPlace(), (x,), y, squared_error, ranks=ranks, chunks=chunks, microbatches=3, schedule="gpipe", exact=True
        )
        assert report.ok, report.summary()


# -- 7, 9, 13: schedules ----------------------------------------------------------------------------------------------


def backwards_first_last(ranks: int, microbatches: int) -> Schedule:
    """Legal, but runs the microbatches in descending order."""
    rows = [
        [Action(rank, op, k) for op in (Op.F, Op.B) for k in reversed(range(microbatches))] for rank in range(ranks)
    ]
    return Schedule("descending", Placement.loop(ranks), microbatches, rows)


@pytest.mark.parametrize("schedule", [*names(), backwards_first_last(3, 5)], ids=[*names(), "descending"])
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


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("schedule", names())
def test_trap_13_skips_over_several_cuts(schedule: str, ranks: int) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 7), torch.randn(ROWS, 7)
    report = verify(SkipsTwice(7), (x,), y, squared_error, ranks=ranks, microbatches=5, schedule=schedule, exact=True)
    assert report.ok, report.summary()


# -- 14, 15: structures, and gradients that are not there -------------------------------------------------------------


class Dicts(nn.Module):
    """Takes and returns a dict of tensors, whole numbers, flags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        assert values["text"] == "word"
        x = self.layer(values["x"]) * values["factor"] + values["offset"]
        return {**values, "x": x if values["flag"] else -x, "nested": (x.tanh(), [values["factor"]])}


def dict_loss(output: dict[str, Any], target: dict[str, Any]) -> Tensor:
    assert output["nested"][1] == [2]
    assert target["power"] == 2
    return (output["x"] - target["a"]["b"]).abs().pow(target["power"]).mean() + output["nested"][0].mean()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_trap_14_dicts_numbers_and_text_between_stages_and_in_targets(ranks: int) -> None:
    x, y = batch()
    values = {"x": x, "factor": 2, "flag": False, "text": "word", "offset": torch.tensor(0.5)}
    target = {"a": {"b": y}, "power": 2}
    for schedule in names():
        report = verify(
            [Dicts(), Dicts(), Dicts()],
            (values,),
            target,
            dict_loss,
            ranks=ranks,
            microbatches=4,
            schedule=schedule,
            exact=True,
        )
        assert report.ok, report.summary()


def test_trap_15_a_pipeline_that_never_runs_backward_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    monkeypatch.setattr("penstock.runtime.exact.backward", lambda roots, grads: None)
    report = verify(mlp(), (x,), y, squared_error, ranks=1, microbatches=2)
    missing = [row.name for row in report.wrong if row.verdict == "missing"]
    assert missing == [name for name, _ in mlp().named_parameters()]
    with pytest.raises(VerificationError, match=r"gradient 0\.weight on stage 0: missing in the pipeline"):
        report.check()


def test_trap_15_one_missing_gradient_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()
    step = penstock.Pipeline.step

    def sabotaged(self: penstock.Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        dict(self.named_parameters())["3.bias"].grad = None
        return result

    monkeypatch.setattr(penstock.Pipeline, "step", sabotaged)
    report = verify(mlp(), (x,), y, squared_error, ranks=3, microbatches=2)
    assert [(row.name, row.verdict) for row in report.wrong] == [("3.bias", "missing")]


def test_trap_15_a_gradient_that_should_not_be_there_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Spare(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
            self.spare = nn.Parameter(torch.zeros(3))

        def forward(self, x: Tensor) -> Tensor:
            return self[1](self[0](x)) + 0 * self.spare.detach().sum()

    x, y = batch()
    report = verify(Spare(), (x,), y, squared_error, ranks=2, microbatches=2)
    assert report.ok
    assert "spare" in [row.name for row in report.rows]
    step = penstock.Pipeline.step

    def sabotaged(self: penstock.Pipeline, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        for name, parameter in self.named_parameters():
            if name == "spare":
                parameter.grad = torch.zeros(3)
        return result

    monkeypatch.setattr(penstock.Pipeline, "step", sabotaged)
    report = verify(Spare(), (x,), y, squared_error, ranks=2, microbatches=2)
    assert [(row.name, row.verdict) for row in report.wrong] == [("spare", "unexpected")]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_trap_15_a_stage_whose_backward_does_nothing_fails(monkeypatch: pytest.MonkeyPatch, stage: int) -> None:
    backward = StageRunner.backward

    def skipping(self: StageRunner, microbatch: int, grads: Any) -> None:
        backward(self, microbatch, [None for _ in grads] if self.meta.index == stage else grads)

    x, y = batch()
    monkeypatch.setattr(StageRunner, "backward", skipping)
    report = verify(mlp(), (x,), y, squared_error, ranks=3, microbatches=2)
    wrong = [row for row in report.wrong if row.kind == "gradient"]
    assert {row.stages for row in wrong} == {(s,) for s in range(stage + 1)}


# -- 17: options ------------------------------------------------------------------------------------------------------


def options_case() -> dict[str, Callable[[], None]]:
    """For each option of `pipeline`, what shows that it is used."""
    x, y = batch()

    def made(**options: Any) -> penstock.Pipeline:
        given = {"ranks": 2, "microbatches": 2, "loss": squared_error, **options}
        model = given.pop("model", None) or mlp()
        return pipeline(model, given.pop("example_args", (x,)), given.pop("example_kwargs", None), **given)

    def refused(error: type[Exception], match: str, **options: Any) -> None:
        with pytest.raises(error, match=match):
            made(**options)

    def step(**options: Any) -> penstock.StepResult:
        with made(**options) as pipe:
            return pipe.step(x, target=y)

    def example_kwargs() -> None:
        with made(example_args=(), example_kwargs={"input": x}, model=mlp(1), ranks=1) as pipe:
            pipe.step(input=x, target=y)

    def balance() -> None:
        model = nn.Sequential(nn.Linear(WIDTH, 400), nn.Linear(400, WIDTH), *mlp(4))
        assert made(model=model, balance="layers").cuts != made(model=model, balance="parameters").cuts
        refused(ArgumentError, "balance='time': expected one of 'parameters', 'layers'", balance="time")

    def leaves() -> None:
        whole = nn.Module()
        whole.inner, whole.head = SkipsTwice(WIDTH), nn.Linear(WIDTH, WIDTH)
        whole.forward = lambda x: whole.head(whole.inner(x))  # type: ignore[method-assign]
        assert "self.inner.layers" in made(model=whole).code
        assert "self.inner.layers" not in made(model=whole, leaves=["inner"]).code
        refused(PartitionError, r"leaves: .*'iner'.*'inner'", model=whole, leaves=["iner"])

    def materialize() -> None:
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        seen = []

        def rule(name: str, module: nn.Module) -> None:
            seen.append(name)
            for parameter in module.parameters():
                nn.init.constant_(parameter, 0.25)

        with made(model=model, materialize=rule) as pipe:
            assert all((p == 0.25).all() for p in pipe.parameters())
        assert seen == ["0", "1"]

    def seed() -> None:
        model = nn.Sequential(*mlp(2), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH))
        losses = [step(model=model, seed=seed).loss for seed in (1, 2, 1)]
        assert losses[0] == losses[2] != losses[1]

    return {
        "model": lambda: refused(ArgumentError, "model", model=[1, 2]),
        "example_args": lambda: refused(ShapeError, "example: no tensor with rows", example_args=()),
        "example_kwargs": example_kwargs,
        "ranks": lambda: assert_equal(made(ranks=3).world.ranks, 3),
        "chunks": lambda: assert_equal(len(made(chunks=3, schedule="gpipe").stages), 6),
        "schedule": lambda: assert_equal(made(schedule="naive").schedule.name, "naive"),
        "microbatches": lambda: assert_equal(len(step(microbatches=7).losses), 7),
        "loss": lambda: assert_equal(float(step(loss=lambda output, _: output.sum() * 0 + 3).loss), 3.0),
        "reduction": lambda: refused_in(lambda: step(reduction="median"), "reduction='median'"),
        "cuts": lambda: assert_equal(made(cuts=["4"]).cuts, ("4",)),
        "leaves": leaves,
        "balance": balance,
        "mesh": lambda: refused(ArgumentError, "ranks=2, but the mesh has 1", mesh=one_rank_mesh()),
        "devices": lambda: refused(ArgumentError, "devices has 3 entries; expected one for each of 2", devices=["cpu"] * 3),
        "share_loss": lambda: assert_equal(step(share_loss=False).loss.shape, ()),  # seen on other ranks only
        "materialize": materialize,
        "seed": seed,
    }


def one_rank_mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [0], _init_backend=False, _rank=0)


def refused_in(run: Callable[[], Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        run()


def assert_equal(one: Any, other: Any) -> None:
    assert one == other


SEEN_ELSEWHERE = {"transport"}  # in tests/distributed: it has no meaning in one process


@pytest.mark.parametrize("option", options_case())
def test_trap_17_every_option_is_used(option: str) -> None:
    options_case()[option]()


def test_trap_17_no_option_is_left_out() -> None:
    assert set(inspect.signature(pipeline).parameters) - SEEN_ELSEWHERE == set(options_case())
    with pytest.raises(TypeError, match="unknown_option"):
        pipeline(mlp(), batch()[:1], unknown_option=1)  # type: ignore[call-arg]


# -- 19, 20: recomputation, the meta device ---------------------------------------------------------------------------


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.whole = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.4), True

    def forward(self, x: Tensor) -> Tensor:
        if not self.whole:
            return self.drop(self.layer(x))
        return checkpoint(lambda x: self.drop(self.layer(x)), x, use_reentrant=False)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("schedule", names())
def test_trap_19_recomputation_draws_the_same_masks(schedule: str, ranks: int) -> None:
    """The block is used twice: backward runs its second call again first."""
    found = []
    for whole in (True, False):
        torch.manual_seed(0)
        block, (x, y) = Checkpointed(), batch()
        block.whole = whole
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block, nn.Tanh(), block, Checkpointed(), nn.Linear(WIDTH, WIDTH))
        report = verify(model, (x,), y, squared_error, ranks=ranks, microbatches=3, schedule=schedule, seed=3)
        assert report.ok, report.summary()
        found.append(gradients(model))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make()


def materialized(ranks: int, seed: int = 5) -> dict[str, Tensor]:
    ids, target = tokens()
    model = on_meta(GPT)
    state = torch.get_rng_state()
    with pipeline(model, (ids,), ranks=ranks, microbatches=3, loss=token_error, seed=seed) as pipe:
        assert pipe.step(ids, target=target).loss.isfinite()
        assert torch.equal(torch.get_rng_state(), state)
        assert model.wte.weight is dict(pipe.named_parameters())["wte.weight"]
        return {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}


def test_trap_20_weights_from_the_meta_device_do_not_depend_on_the_number_of_ranks() -> None:
    one = materialized(1)
    assert set(one) == set(dict(GPT().named_parameters()))
    assert all(weight.std() > 0 for name, weight in one.items() if "norm" not in name and "bias" not in name)
    for ranks in (2, 3, 4):
        other = materialized(ranks)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["wte.weight"], materialized(2, seed=6)["wte.weight"])


def test_trap_20_a_meta_model_can_be_verified() -> None:
    ids, target = tokens()
    assert verify(on_meta(GPT), (ids,), target, token_error, ranks=3, microbatches=3, exact=True).ok


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(float(WIDTH)), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table


class TableThatResets(Table):
    def reset_parameters(self) -> None:
        self.table.copy_(torch.arange(float(WIDTH)))


class TableThatForgets(Table):
    def reset_parameters(self) -> None:
        pass


@pytest.mark.parametrize("kind", [Table, TableThatForgets])
def test_trap_20_a_buffer_that_nothing_sets_is_refused(kind: type[Table]) -> None:
    model, (x, _) = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), nn.Linear(WIDTH, WIDTH))), batch()
    with pytest.raises(ArgumentError, match=rf"1.* \(?{kind.__name__}|buffer 1.table") as caught:
        pipeline(model, (x,), ranks=2, loss=squared_error)
    assert "materialize=" in str(caught.value)


def test_trap_20_a_buffer_that_is_set_is_as_set() -> None:
    model, (x, y) = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), TableThatResets(), *mlp(2))), batch()
    with pipeline(model, (x,), ranks=2, loss=squared_error) as pipe:
        pipe.step(x, target=y)
        assert torch.equal(dict(pipe.named_buffers())["1.table"], torch.arange(float(WIDTH)))


# -- 22: frozen stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", ["0", "1", "2", "01", "12", "02"])
@pytest.mark.parametrize("schedule", names())
def test_trap_22_frozen_stages(schedule: str, frozen: str) -> None:
    model, (x, y) = mlp(3), batch()
    for layer in frozen:
        model[int(layer)].requires_grad_(False)
    report = verify(model, (x,), y, squared_error, ranks=3, microbatches=4, schedule=schedule, exact=True)
    assert report.ok, report.summary()
    with pipeline(model, (x,), ranks=3, microbatches=4, schedule=schedule, loss=squared_error) as pipe:
        backward = {action.stage for row in pipe.schedule.rows for action in row if action.op is Op.B}
        first = min(stage for stage in range(3) if str(stage) not in frozen)
        assert backward == set(range(first, 3))
        pipe.step(x, target=y)
        frozen_after = [not p.requires_grad for p in pipe.parameters()]
        assert all((p.grad is None) == was for p, was in zip(pipe.parameters(), frozen_after, strict=True))


def test_trap_22_freezing_between_steps() -> None:
    model, (x, y) = mlp(3), batch()
    reference = copy.deepcopy(model)
    with pipeline(model, (x,), ranks=3, microbatches=4, loss=squared_error) as pipe:
        for frozen in (None, 0, 2):
            for m in (model, reference):
                m.requires_grad_(True)
                if frozen is not None:
                    m[frozen].requires_grad_(False)
            pipe.step(x, target=y)
            step_by_hand(reference, (x,), y, squared_error, 4)
            assert_same_gradients(model, reference)


def test_trap_22_a_stage_without_parameters() -> None:
    x, y = batch()
    model = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH)]
    report = verify(model, (x,), y, squared_error, ranks=3, microbatches=4, exact=True)
    assert report.ok, report.summary()
    with pipeline(nn.Sequential(nn.Tanh(), nn.Tanh()), (x,), ranks=2, loss=squared_error) as pipe:
        assert not list(pipe.named_parameters())
        torch.optim.AdamW(pipe.parameters()).step()


# -- random losses, and errors in the middle of a step ----------------------------------------------------------------


def noisy_loss(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output + torch.randn_like(output), target)


@pytest.mark.parametrize("dropout", [False, True])
def test_a_loss_that_draws_has_a_stream_of_its_own(dropout: bool) -> None:
    def losses(ranks: int, schedule: str) -> list[float]:
        model, (x, y) = mlp(4), batch()
        if dropout:
            model.insert(1, nn.Dropout(0.5))
        with pipeline(model, (x,), ranks=ranks, microbatches=3, schedule=schedule, loss=noisy_loss, seed=1) as pipe:
            return [float(loss) for _ in range(2) for loss in pipe.step(x, target=y).losses]

    first = losses(1, "naive")
    assert len(set(first)) == 6  # no two microbatches, and no two steps, are given the same noise
    for ranks in (2, 4):
        for schedule in names():
            assert losses(ranks, schedule) == first
    x, y = batch()
    assert verify(mlp(), (x,), y, noisy_loss, ranks=3, microbatches=3, exact=True).ok


def test_a_step_that_raised_can_be_repeated() -> None:
    """In one process; with one process a rank, all of them end."""
    model, (x, y) = mlp(), batch()
    reference = copy.deepcopy(model)
    calls: list[int] = []

    def loss(output: Tensor, target: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 2:
            raise ValueError("not today")
        return squared_error(output, target)

    with pipeline(model, (x,), ranks=3, microbatches=3, loss=loss) as pipe:
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="not today") as caught:
            pipe.step(x, target=y)
        assert caught.value.__notes__ == ["penstock: in action 2F1"]
        assert torch.equal(torch.get_rng_state(), state)
        model.zero_grad()
        pipe.step(x, target=y)
        assert pipe.step_count == 1
    step_by_hand(reference, (x,), y, squared_error, 3)
    assert_same_gradients(model, reference)


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"schedule": "1f1f"}, ArgumentError, ["1f1f", "did you mean '1f1b'", "gpipe"]),
        ({"ranks": 7}, PartitionError, ["7", "6"]),
        ({"ranks": 3, "chunks": 3, "schedule": "gpipe"}, PartitionError, ["9", "6"]),
        ({"ranks": 2, "cuts": ["9"]}, PartitionError, ["cut", "'9'", "nearest"]),
        ({"ranks": 2, "cuts": ["2", "4"]}, ArgumentError, ["cuts", "stages=2"]),
        ({"ranks": 3, "cuts": ["4", "2"]}, PartitionError, ["'4'", "'2'"]),
        ({"microbatches": 0}, ArgumentError, ["microbatches=0", "at least 1"]),
        ({"microbatches": 2.5}, ArgumentError, ["microbatches=2.5", "whole number"]),
        ({"microbatches": 12}, ArgumentError, ["microbatches=12", "11 rows", "fewer microbatches"]),
        ({"ranks": 0}, ArgumentError, ["ranks=0", "at least 1"]),
        ({"ranks": -1}, ArgumentError, ["ranks=-1", "at least 1"]),
        ({"chunks": 0}, ArgumentError, ["chunks=0", "at least 1"]),
        ({"ranks": 2, "chunks": 2, "schedule": "1f1b"}, ArgumentError, ["chunks=2", "1f1b", "1 chunk"]),
        ({"ranks": 3, "schedule": generate("gpipe", 2, 8)}, ArgumentError, ["'gpipe'", "2 ranks", "3"]),
        ({"balance": "time"}, ArgumentError, ["balance='time'", "'layers'"]),
        ({"devices": ["cpu"], "ranks": 2}, ArgumentError, ["devices has 1", "2 ranks"]),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    x, _ = batch()
    with pytest.raises(error) as caught:
        pipeline(mlp(), (x,), **{"loss": squared_error, **options})
    for word in words:
        assert word in str(caught.value)


def test_bad_schedule_objects_state_their_own_microbatches() -> None:
    """A schedule says how many microbatches there are: another number beside it is not ignored."""
    x, _ = batch()
    with pytest.raises(ArgumentError, match=r"microbatches=4.*5"):
        pipeline(mlp(), (x,), ranks=2, microbatches=4, schedule=generate("gpipe", 2, 5), loss=squared_error)


@pytest.mark.parametrize(
    ("loss", "given"),
    [
        (lambda output, _: output, r"a tensor of shape \[4, 9\]"),
        (lambda output, _: output.sum().item(), "float"),
        (lambda output, _: output.mean(1), r"a tensor of shape \[4\]"),
    ],
)
def test_bad_loss(loss: Any, given: str) -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=3, loss=loss) as pipe:
        with pytest.raises(ArgumentError, match=rf"loss.* returned {given}; expected a scalar"):
            pipe.step(x, target=y)


def test_bad_no_loss_at_all() -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=3) as pipe:
        with pytest.raises(ArgumentError, match=r"loss=None, .*\(Tensor\) holds no scalar loss; pass loss="):
            pipe.step(x, target=y)
        result = pipe.evaluate(x, outputs=True)
        assert len(result.outputs) == 3
        with pytest.raises(ArgumentError, match=r"result.loss: there is no loss"):
            _ = result.loss


def test_bad_target_missing() -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=3, loss=squared_error) as pipe:
        with pytest.raises(ArgumentError, match=r"target=None, .*pass target="):
            pipe.step(x)
        assert pipe.step(x, target=y).loss > 0
        with pytest.raises(ArgumentError, match=r"result.outputs: not kept; pass outputs=True"):
            _ = pipe.step(x, target=y).outputs


def test_bad_closed_pipeline() -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=3, loss=squared_error) as pipe:
        pipe.step(x, target=y)
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(ArgumentError, match="this pipeline was closed; make a new one"):
            call(x, target=y)
    pipe.close()


def test_bad_names_of_model_arguments() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.layer(x) + target

    x, y = batch()
    with pytest.raises(ArgumentError, match=r"example_kwargs: .*'target'.*Pipeline.step.*by position"):
        pipeline(Named(), (x,), {"target": y}, loss=squared_error)


def test_bad_inputs_of_a_step() -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=3, loss=squared_error) as pipe:
        with pytest.raises(ShapeError, match="structure"):
            pipe.step(x, x, target=y)
        with pytest.raises(ShapeError, match=r"requires a gradient.*detach"):
            pipe.step(x.clone().requires_grad_(), target=y)
        with pytest.raises(ShapeError, match="disagree on the number of rows"):
            pipeline(nn.Bilinear(WIDTH, WIDTH, 2), (x, x[:4]), loss=squared_error)


def test_close_leaves_no_hook_behind() -> None:
    torch.manual_seed(0)
    model, (ids, target) = GPT(dropout=0.1), tokens()
    with pipeline(model, (ids,), ranks=2, microbatches=3, loss=token_error) as pipe:
        pipe.step(ids, target=target)
        assert any(module._forward_pre_hooks for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
