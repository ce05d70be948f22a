"""Half precision: autocast around a step and inside a model, scaled losses, and models that are wholly in bfloat16."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from distributed.precision_jobs import OVERFLOWS, STEPS, Trained, by_hand, in_a_pipeline_of
from penstock import checkpoint
from penstock._base.errors import ArgumentError
from scaffolding.models import CASES, Case
from scaffolding.proofs import proven
from scaffolding.ranks import Ranks
from scaffolding.representatives import representatives
from scaffolding.small import batch, mlp

HALF = (torch.bfloat16, torch.float16)


# -- autocast ---------------------------------------------------------------------------------------------------------


class Twice(nn.Module):
    """Uses a weight twice in an autocast of its own, whose casts are kept or not."""

    def __init__(self, keeps_casts: bool) -> None:
        super().__init__()
        self.a, self.b, self.keeps_casts = nn.Linear(16, 16), nn.Linear(16, 16), keeps_casts

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=self.keeps_casts):
            h = self.a(self.a(x).tanh()).tanh()
        return self.b(h.float())


class PartlyFull(nn.Module):
    """Layers that are autocast, and some that are kept in float32."""

    def __init__(self, inside: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.inside = inside

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.inside or torch.is_autocast_enabled("cpu")):
            x = self.layers[0](x)
            with torch.autocast("cpu", enabled=False):
                x = self.layers[2](self.layers[1](x.float()))
            return self.layers[3](x).float()


class TwoInputs(nn.Module):
    """Bilinear layers, which autocast leaves in float32, between linear ones in its lower precision."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.linear = nn.Bilinear(16, 16, 16), nn.Linear(16, 16)
        self.between, self.last = nn.Bilinear(16, 16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(self.first(x, x.tanh())).float()
        made: Tensor = self.last(self.between(x, x.tanh()) + self.between(x, x))
        return made.float()


@pytest.mark.parametrize(
    ("make", "around", "options"),
    [
        (CASES["gpt"], torch.bfloat16, {"schedule": "zb-h1", "microbatches": 2}),
        (CASES["convnet"], torch.float16, {"microbatches": 2}),
        (lambda: Twice(keeps_casts=True), None, {"schedule": "zb-h1"}),
        (lambda: Twice(keeps_casts=False), None, {"schedule": "gpipe"}),
        (lambda: PartlyFull(inside=False), torch.bfloat16, {}),
        (lambda: PartlyFull(inside=True), None, {"schedule": "zb-h1", "ranks": 4}),
        (TwoInputs, torch.bfloat16, {"schedule": "zb-h1", "balance": "flops"}),
    ],
)
def test_a_step_under_autocast_gives_the_bits_of_one_device(make: Any, around: Any, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    made = make()
    case = made if isinstance(made, Case) else Case(made, batch(8, 16)[:1], {}, batch(8, 16)[1], F.mse_loss)
    given = {"ranks": 2, "microbatches": 4, "exact": True, **options}
    with torch.autocast("cpu", dtype=around, enabled=around is not None):
        proven(case.model, *case.args, case.target, case.loss, **given)


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


@pytest.mark.distributed
@pytest.mark.parametrize(("order", "clip"), representatives(2, [(2, "1f1b"), (4, "zb-h1")], [False, True]), ids=str)
def test_scaled_training_is_that_of_torchs_scaler_on_one_device(
    order: tuple[int, str], clip: bool, request: pytest.FixtureRequest
) -> None:
    ranks, schedule = order
    pool: Ranks = request.getfixturevalue(f"ranks{ranks}")
    expected = by_hand(clip)
    assert len(set(expected.scales)) > 2  # the scale went down and up
    assert_same_training(pool.run(in_a_pipeline_of, {"clip": clip, "schedule": schedule}), expected)


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
        for scale in (0.0, math.nan, "2"):
            with pytest.raises(ArgumentError, match=r"loss_scale=.*positive, finite number"):
                pipe.step(x, target=y, loss_scale=scale)  # type: ignore[arg-type]
    with penstock.pipeline(mlp().half(), (x.half(),), ranks=2, microbatches=4, loss=F.mse_loss) as pipe:
        scaler, optimizer = penstock.GradScaler(pipe, init_scale=8.0), torch.optim.SGD(pipe.parameters())
        pipe.step(x.half(), target=y.half(), loss_scale=scaler.get_scale())
        with pytest.raises(ArgumentError, match=r"float16.*torch\.autocast"):
            scaler.unscale_(optimizer)


# -- models in half precision -----------------------------------------------------------------------------------------


SHORT = ["interleaved-1f1b", "zb-h1", "zb-v", "dualpipe-v"]


@pytest.mark.parametrize(("name", "dtype"), representatives(2, SHORT, HALF), ids=str)
def test_half_models_through_every_schedule(name: str, dtype: torch.dtype) -> None:
    x, y = batch(16)
    report = proven(mlp(16).to(dtype), x.to(dtype), y.to(dtype), ranks=4, microbatches=8, schedule=name)
    copied = any(len(row.stages) > 1 for row in report.rows if row.kind == "gradient")
    assert copied or {row.verdict for row in report.rows} == {"equal"}  # what one stage holds has the same bits


def test_torchs_unscale_calls_the_method_that_the_scaler_overrides() -> None:
    parameters = inspect.signature(torch.amp.GradScaler._unscale_grads_).parameters
    assert [*parameters] == ["self", "optimizer", "inv_scale", "found_inf", "allow_fp16"]
