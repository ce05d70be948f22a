"""One test for each thing that others get wrong (the list in docs/design.md), where it spoils what is trained.

The rest of the list: test_traps_between.py, test_options.py, and, with processes, tests/distributed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import ArgumentError, pipeline, verify
from penstock.schedule import Op
from scaffolding.by_hand import assert_same_gradients, sizes_by_hand, step_by_hand
from scaffolding.models import GPT, ConvNet, squared_error, token_error
from scaffolding.proofs import proven
from scaffolding.small import ROWS, WIDTH, batch, gradients, mlp, tokens

# -- 1 ----------------------------------------------------------------------------------------------------------------


def test_trap_1_tied_weights() -> None:
    torch.manual_seed(0)
    model = GPT()
    reference = copy.deepcopy(model)
    ids, target = tokens()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, reference)]
    with pipeline(model, (ids,), ranks=4, microbatches=3, loss=token_error) as pipe:
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


# -- 19, 20: recomputation, the meta device ---------------------------------------------------------------------------


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
    for ranks in (2, 4):
        other = materialized(ranks)
        assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["wte.weight"], materialized(2, seed=6)["wte.weight"])


def test_trap_20_a_meta_model_can_be_verified() -> None:
    ids, target = tokens()
    assert verify(on_meta(GPT), (ids,), target=target, loss_fn=token_error, ranks=3, microbatches=3, exact=True).ok


class TwoNames(nn.Module):
    """A parameter and a buffer, each under two names of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = self.same_weight = nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.register_buffer("scale", torch.empty(WIDTH))
        self.register_buffer("same_scale", self.scale)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=0.3)
        self.scale.fill_(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight * self.scale) @ self.same_weight * self.same_scale


def test_trap_20_two_names_in_one_module_stay_one_tensor() -> None:
    x, y = batch()
    model = on_meta(lambda: nn.Sequential(TwoNames(), nn.Linear(WIDTH, WIDTH), TwoNames()))
    assert verify(model, (x,), target=y, loss_fn=squared_error, ranks=2, microbatches=3, exact=True).ok
    with pipeline(model, (x,), ranks=2, microbatches=3, loss=squared_error):
        assert model[0].weight is model[0].same_weight
        assert model[0].scale is model[0].same_scale
        assert not model[0].weight.is_meta


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


def test_trap_20_a_buffer_is_as_it_is_set_and_refused_if_nothing_sets_it() -> None:
    x, y = batch()
    for kind in (Table, TableThatForgets, TableThatResets):
        model = on_meta(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), kind(), *mlp(2)))  # noqa: B023
        if kind is not TableThatResets:
            with pytest.raises(ArgumentError, match=rf"1.* \(?{kind.__name__}|buffer 1.table") as caught:
                pipeline(model, (x,), ranks=2, loss=squared_error)
            assert "materialize=" in str(caught.value)
            continue
        with pipeline(model, (x,), ranks=2, loss=squared_error) as pipe:
            pipe.step(x, target=y)
            assert torch.equal(dict(pipe.named_buffers())["1.table"], torch.arange(float(WIDTH)))


# -- 2, 3, 12, 21: means, sums, weights -------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
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


@pytest.mark.parametrize(("reduction", "microbatches"), [("mean", 3), ("mean", 11), ("sum", 8)])
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


def count(target: Tensor) -> Tensor:
    return (target != -100).sum()


def masked_tokens() -> tuple[Tensor, Tensor]:
    ids, target = tokens()
    target[0, 1:] = target[4:7] = -100
    return ids, target


@pytest.mark.parametrize("microbatches", [2, 11])
def test_trap_21_masked_targets(microbatches: int) -> None:
    """With 11 microbatches, one holds no token that counts at all: its own mean is NaN."""
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


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_trap_21_a_microbatch_in_which_nothing_counts(schedule: str) -> None:
    torch.manual_seed(0)
    model, (ids, target) = GPT(), masked_tokens()
    whole = copy.deepcopy(model)
    proven(model, ids, target, masked_mean, ranks=2, microbatches=11, reduction=count, schedule=schedule, exact=True)
    whole.load_state_dict(model.state_dict())  # the last step has other weights
    masked_mean(whole(ids), target).backward()
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


def test_trap_4_evaluation_leaves_a_loss_that_is_a_module_alone() -> None:
    class Averaging(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nn.Dropout(0.5)
            self.register_buffer("mean", torch.zeros(WIDTH))

        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            if self.training:
                self.mean.lerp_(output.detach().mean(0), 0.5)
            return squared_error(self.dropout(output) - self.mean.clone(), target)

    (x, y), loss = batch(), Averaging()
    with pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=loss) as pipe:
        pipe.step(x, target=y)
        before = loss.mean.clone()
        assert pipe.evaluate(x, target=y).loss == pipe.evaluate(x, target=y).loss
        assert torch.equal(loss.mean, before)
        assert loss.training
        assert loss.dropout.training


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


def test_trap_8_weights_do_not_depend_on_the_number_of_ranks() -> None:
    model, (x, _) = mlp(), batch()
    expected = copy.deepcopy(model.state_dict())
    with pipeline(model, (x,), ranks=4, loss=squared_error) as pipe:
        weights = dict(pipe.named_parameters())
    assert list(weights) == list(expected)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    assert len({weight.detach().numpy().tobytes() for weight in weights.values()}) == len(weights)  # none is alike


# -- 22: frozen stages ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "frozen"),
    [("1f1b", "0"), ("zb-h1", "2"), ("zb-h2", "01"), ("1f1b", "12"), ("zb-h1", "02")],
)
def test_trap_22_frozen_stages(schedule: str, frozen: str) -> None:
    model, (x, y) = mlp(3), batch()
    for layer in frozen:
        model[int(layer)].requires_grad_(False)
    proven(model, x, y, ranks=3, microbatches=4, schedule=schedule, exact=True)
    with pipeline(model, (x,), ranks=3, microbatches=4, schedule=schedule, loss=squared_error) as pipe:
        backward = {action.stage for row in pipe.schedule.rows for action in row if action.op in (Op.B, Op.I)}
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
    proven(model, x, y, ranks=3, microbatches=4, exact=True)
    with pipeline(nn.Sequential(nn.Tanh(), nn.Tanh()), (x,), ranks=2, loss=squared_error) as pipe:
        assert not list(pipe.named_parameters())
        torch.optim.AdamW(pipe.parameters()).step()
