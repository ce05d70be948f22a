"""Half precision: autocast around a step and inside a model, scaled losses, and models that are wholly in bfloat16."""

from __future__ import annotations

import copy
import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from distributed.precision_jobs import OVERFLOWS, STEPS, Trained, by_hand, in_a_pipeline, in_a_pipeline_of
from penstock import checkpoint
from penstock._base.errors import ArgumentError
from scaffolding.by_hand import assert_same_gradients
from scaffolding.models import CASES
from scaffolding.proofs import proven
from scaffolding.ranks import Ranks
from scaffolding.representatives import representatives
from scaffolding.small import batch, mlp

HALF = (torch.bfloat16, torch.float16)


# -- autocast ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "dtype", "ranks", "schedule"),
    [("gpt", torch.bfloat16, 2, "zb-h1"), ("convnet", torch.float16, 2, "1f1b")],
)
def test_a_step_under_autocast_gives_the_bits_of_one_device(
    name: str, dtype: torch.dtype, ranks: int, schedule: str
) -> None:
    case = CASES[name]()
    with torch.autocast("cpu", dtype=dtype):
        options = {"ranks": ranks, "microbatches": 2, "schedule": schedule, "exact": True}
        proven(case.model, *case.args, case.target, case.loss, **options)


def test_the_backward_is_split_under_autocast_as_it_is_without() -> None:
    case, found = CASES["gpt"](), []
    for on in (True, False):
        options = {"schedule": "zb-h1", "ranks": 2, "microbatches": 2, "loss_fn": case.loss}
        with penstock.pipeline(copy.deepcopy(case.model), case.args, **options) as pipe:
            for _ in range(2):
                with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                    pipe.step(*case.args, target=case.target)
            found.append(pipe.deferred_weight_grad_fraction)
    assert found[0] == found[1]
    assert min(found[0].values()) > 0.8


class Twice(nn.Module):
    """Uses a weight twice in an autocast of its own, whose casts are kept or not."""

    def __init__(self, keeps_casts: bool) -> None:
        super().__init__()
        self.a, self.b, self.keeps_casts = nn.Linear(16, 16), nn.Linear(16, 4), keeps_casts

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.keeps_casts):
            h = self.a(self.a(x).tanh()).tanh()
        return self.b(h.float())


@pytest.mark.parametrize(("keeps_casts", "schedule"), [(True, "zb-h1"), (False, "gpipe")])
def test_an_autocast_keeps_casts_as_the_forward_says(keeps_casts: bool, schedule: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 16), torch.randn(8, 4)
    proven(Twice(keeps_casts), x, y, ranks=2, microbatches=4, schedule=schedule)


class PartlyFull(nn.Module):
    """Layers that are autocast, and some that are kept in float32."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            x = self.layers[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.layers[2](self.layers[1](x.float()))
            return self.layers[3](x).float()


@pytest.mark.parametrize(("inside", "ranks", "schedule"), [(False, 2, "1f1b"), (True, 4, "zb-h1")])
def test_what_is_kept_out_of_autocast_has_gradients_in_full_precision(inside: bool, ranks: int, schedule: str) -> None:
    x, y = batch(8, 64)
    torch.manual_seed(0)
    alone = PartlyFull(inside)
    model = copy.deepcopy(alone)
    for rows, target in zip(x.chunk(4), y.chunk(4), strict=True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
            loss = F.mse_loss(alone(rows.clone()), target.clone()) / 4
        loss.backward()  # type: ignore[no-untyped-call]
    with penstock.pipeline(model, (x,), ranks=ranks, microbatches=4, loss=F.mse_loss, schedule=schedule) as pipe:
        for _ in range(2):  # from the second microbatch on, zb-h1 puts weight gradients off to W
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not inside):
                pipe.step(x, target=y)
    assert_same_gradients(model, alone)


def test_autocast_can_go_on_and_off_between_steps() -> None:
    x, y = batch(8)
    model = mlp()
    seen: dict[bool, list[Tensor]] = {False: [], True: []}
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        for on in (False, True, True, False):
            model.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=on):
                pipe.step(x, target=y)
            assert model[0].weight.grad is not None
            seen[on].append(model[0].weight.grad.clone())
    assert torch.equal(*seen[False])
    assert torch.equal(*seen[True])
    assert not torch.equal(seen[False][0], seen[True][0])


# -- scaled losses ----------------------------------------------------------------------------------------------------


def assert_same_training(trained: list[Trained], expected: Trained) -> None:
    """`trained` of every rank, against one device's."""
    assert sum(math.isfinite(norm) for norm in expected.norms) in (0, STEPS - len(OVERFLOWS))
    for one in trained:
        assert one.scales == expected.scales
        assert one.losses == expected.losses
        assert torch.equal(*(torch.tensor(of.norms).nan_to_num(nan=-1.0) for of in (one, expected)))
    weights = {name: tensor for one in trained for name, tensor in one.weights.items()}
    assert weights.keys() == expected.weights.keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, expected.weights[name]), name


@pytest.mark.parametrize(
    ("order", "clip"), representatives(2, [(1, "naive"), (2, "zb-h1"), (4, "1f1b")], [True, False]), ids=str
)
def test_scaled_training_is_that_of_torchs_scaler_on_one_device(order: tuple[int, str], clip: bool) -> None:
    ranks, schedule = order
    expected = by_hand(clip)
    assert len(set(expected.scales)) > 2  # the scale went down and up
    assert_same_training([in_a_pipeline(0, clip, ranks=ranks, schedule=schedule)], expected)


@pytest.mark.distributed
@pytest.mark.parametrize(("order", "clip"), representatives(2, [(2, "1f1b"), (4, "zb-h1")], [False, True]), ids=str)
def test_one_rank_with_an_infinity_makes_all_ranks_skip(
    order: tuple[int, str], clip: bool, request: pytest.FixtureRequest
) -> None:
    ranks, schedule = order
    pool: Ranks = request.getfixturevalue(f"ranks{ranks}")
    assert_same_training(pool.run(in_a_pipeline_of, {"clip": clip, "schedule": schedule}), by_hand(clip))


def test_the_scale_multiplies_gradients_and_not_the_loss() -> None:
    x, y = batch(8)
    model = mlp()
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        plain = pipe.step(x, target=y).loss
        expected = [parameter.grad * 1024 for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        assert torch.equal(pipe.step(x, target=y, loss_scale=1024.0).loss, plain)
        for parameter, grad in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad, grad)  # type: ignore[arg-type]


def test_a_scaler_goes_into_checkpoints(tmp_path: Path) -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe, growth_interval=2), torch.optim.SGD(pipe.parameters())
        for _ in range(3):
            pipe.step(x, target=y, loss_scale=scaler.get_scale())
            scaler.step(optimizer)
            scaler.update()
        checkpoint.save(tmp_path, pipe, optimizer, stateful={"scaler": scaler})
        other = penstock.GradScaler(pipe)
        checkpoint.load(tmp_path, pipe, optimizer, stateful={"scaler": other})
    assert other.get_scale() == 2.0**17
    assert other.state_dict() == scaler.state_dict()
    assert other.state_dict().keys() == torch.amp.GradScaler("cpu").state_dict().keys()
    assert other.state_dict()["_growth_tracker"] == 1


def test_two_optimizers_skip_each_by_its_own_gradients() -> None:
    x, y = batch(8)
    model = mlp()
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        scaler = penstock.GradScaler(pipe)
        good, bad = torch.optim.SGD(model[0].parameters()), torch.optim.SGD(model[1].parameters())
        pipe.step(x, target=y, loss_scale=scaler.get_scale())
        model[1].bias.grad[3] = torch.nan
        before = [parameter.detach().clone() for parameter in model.parameters()]
        for optimizer in (good, bad):
            scaler.step(optimizer)
        scaler.update()
    changed = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
    assert changed[:4] == [True, True, False, False]
    assert scaler.get_scale() == 2.0**15


def test_a_disabled_scaler_does_nothing() -> None:
    x, y = batch(8)
    model = mlp()
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe, enabled=False), torch.optim.SGD(pipe.parameters())
        pipe.step(x, target=y, loss_scale=scaler.get_scale())
        before = model[0].weight.detach().clone()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(before, model[0].weight)
    assert scaler.get_scale() == 1.0


def test_what_a_scaler_refuses() -> None:
    x, y = batch(8)
    with pytest.raises(ArgumentError, match=r"expected a pipeline, as penstock\.pipeline returns it"):
        penstock.GradScaler("cpu")  # type: ignore[arg-type]
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe), torch.optim.SGD(pipe.parameters())
        with pytest.raises(ArgumentError, match=r"loss_scale=scaler\.get_scale\(\)"):
            scaler.scale(pipe.step(x, target=y).loss)
        with pytest.raises(ArgumentError, match="loss_scale=1, but the scaler's is 65536"):
            scaler.unscale_(optimizer)
        pipe.step(x, target=y, loss_scale=scaler.get_scale())
        with pytest.raises(ArgumentError, match="closure"):
            scaler.step(optimizer, lambda: 0.0)
        with pytest.raises(RuntimeError, match=r"without step\(\)"):
            scaler.update()
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="already"):
            scaler.step(optimizer)


@pytest.mark.parametrize("scale", [0.0, math.nan, "2"])
def test_a_scale_is_a_positive_number(scale: Any) -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        with pytest.raises(ArgumentError, match=r"loss_scale=.*positive, finite number"):
            pipe.step(x, target=y, loss_scale=scale)


# -- models in half precision -----------------------------------------------------------------------------------------


SHORT = ["interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"]


@pytest.mark.parametrize(("name", "dtype"), representatives(2, SHORT, HALF), ids=str)
def test_half_models_through_every_schedule(name: str, dtype: torch.dtype) -> None:
    x, y = batch(16)
    report = proven(mlp(16).to(dtype), x.to(dtype), y.to(dtype), ranks=4, microbatches=8, schedule=name)
    copied = any(len(row.stages) > 1 for row in report.rows if row.kind == "gradient")
    assert copied or {row.verdict for row in report.rows} == {"equal"}  # what one stage holds has the same bits


def test_gradients_in_float16_are_not_scaled() -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp().half(), (x.half(),), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe, init_scale=8.0), torch.optim.SGD(pipe.parameters())
        pipe.step(x.half(), target=y.half(), loss_scale=scaler.get_scale())
        with pytest.raises(ArgumentError, match=r"float16.*torch\.autocast"):
            scaler.unscale_(optimizer)


class TwoInputs(nn.Module):
    """Bilinear layers, which autocast leaves in float32, between linear ones in its lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Bilinear(6, 6, 6), nn.Linear(6, 6)
        self.between, self.last = nn.Bilinear(6, 6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.first(x, x.tanh())).float()
        made: Tensor = self.last(self.between(x, x.tanh()) + self.between(x, x))
        return made.float()


def test_bilinear_layers_under_autocast_give_the_bits_of_one_device() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    options = {"ranks": 2, "microbatches": 4, "schedule": "zb-h1", "balance": "flops", "exact": True}
    with torch.autocast("cpu", dtype=torch.bfloat16):
        proven(TwoInputs, x, y, **options)


def test_torchs_unscale_calls_the_method_that_the_scaler_overrides() -> None:
    parameters = inspect.signature(torch.amp.GradScaler._unscale_grads_).parameters
    assert [*parameters] == ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"]
