"""`grad_dtype=torch.float32`: gradients of a model in bfloat16 are the float32 sums of its bfloat16 terms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, checkpoint
from penstock.schedule import from_csv
from scaffolding.low_precision import MICROBATCHES, TIED, Gradients, Net, assert_sums, batch, by_hand, loss
from scaffolding.proofs import after_each_step


def pipeline(model: nn.Module | None = None, **options: Any) -> penstock.Pipeline:
    given = {"ranks": 2, "microbatches": MICROBATCHES, "loss_fn": loss, "grad_dtype": torch.float32} | options
    return penstock.pipeline(model or Net(), batch()[:1], **given)


def gradients(pipe: penstock.Pipeline) -> Gradients:
    return {name: parameter.grad for name, parameter in pipe.session.model_parts.all_parameters()}


def trained(steps: int = 2, model: nn.Module | None = None, **options: Any) -> Gradients:
    with pipeline(model, **options) as pipe:
        for step in range(steps):
            x, y = batch(step)
            pipe.step(x, target=y)
        return gradients(pipe)


def test_a_sum_in_bfloat16_would_be_another() -> None:
    low, sums = by_hand(steps=2, accumulate=None), by_hand(steps=2)
    without = trained(grad_dtype=None)
    for name, grad in without.items():
        other = low[name]
        assert (grad is None) == (other is None)
        if grad is not None and other is not None and name != TIED:
            assert torch.equal(grad, other), name
            assert name == "scale" or not torch.equal(grad.float(), sums[name]), name


OUT_OF_ORDER = from_csv("0F0,0F1,0F2,0F3,0I3,0I2,0I1,0I0,0W0,0W1,0W2,0W3")


@pytest.mark.parametrize(
    "options",
    [
        *({"schedule": name} for name in ("1f1b", "interleaved-1f1b", "zb-v", "dualpipe-v")),
        {"ranks": 1},  # the tied weight's two uses are added by autograd
        {"ranks": 1, "schedule": "zb-h1"},  # or by W
        {"recompute": 1},
        {"offload": True},
        {"schedule": "zb-h1", "recompute": "always", "check_finite": True},
        {"schedule": "zb-h1", "compile": {"backend": "eager"}},
        {"schedule": OUT_OF_ORDER, "ranks": 1, "microbatches": None},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's compiler
def test_gradients_are_float32_sums_of_bfloat16_terms(options: dict[str, Any]) -> None:
    mine, expected = trained(**options), by_hand(steps=2)
    assert mine.keys() == expected.keys()
    assert_sums(mine, expected, reordered=TIED)


def test_hooks_see_float32() -> None:
    model, seen = Net(), list[Tensor]()
    weight = model.blocks[1][1].weight
    weight.register_hook(seen.append)
    weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    grads = trained(1, model, schedule="zb-h1")
    assert_sums(grads, by_hand(), reordered=TIED)
    assert len(seen) == 2 * MICROBATCHES
    assert {tensor.dtype for tensor in seen} == {torch.float32}
    assert torch.equal(seen[-1], weight.grad)


def test_gradients_that_were_there_are_kept() -> None:
    model = Net()
    ids, target = batch(0)
    loss(model(ids), target).backward()
    before = {name: None if p.grad is None else p.grad.float().clone() for name, p in model.named_parameters()}
    with pipeline(model) as pipe:
        for name, grad in gradients(pipe).items():
            assert grad is None or (grad.dtype == torch.float32 and torch.equal(grad, before[name])), name
        pipe.step(ids, target=target)
        added = by_hand()
        for name, grad in gradients(pipe).items():
            one, other = before[name], added[name]
            if grad is not None and one is not None and other is not None:
                torch.testing.assert_close(grad, one + other)


def test_the_norm_is_that_of_the_float32_gradients() -> None:
    with pipeline() as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        grads = [grad.clone() for grad in gradients(pipe).values() if grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(grad) for grad in grads]))
        assert torch.equal(pipe.clip_grad_norm_(0.1), norm)
        factor = 0.1 / (norm + 1e-6)
        clipped = [grad for grad in gradients(pipe).values() if grad is not None]
        assert all(torch.equal(mine, grad * factor) for mine, grad in zip(clipped, grads, strict=True))


def test_a_scaler_takes_float16_parameters() -> None:
    found = []
    for scale in (1.0, 2.0**10):
        with pipeline(Net(dtype=torch.float16)) as pipe:
            scaler = penstock.GradScaler(pipe, init_scale=scale)
            x, y = batch()
            pipe.step(x, target=y, loss_scale=scaler.get_scale())
            scaler.unscale_(torch.optim.SGD(pipe.parameters()))
            found.append([grad for grad in gradients(pipe).values() if grad is not None])
    for one, other in zip(*found, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).abs().max() <= 1e-2 * other.abs().max()


def optimized(steps: int, folder: Path, *, stop: int | None = None) -> dict[str, Tensor]:
    """The weights after some steps; at `stop` they are saved, and a new pipeline goes on from there."""
    pipe, optimizer = None, None
    for step in range(steps):
        if pipe is None or step == stop:
            if pipe is not None:
                checkpoint.save(folder, pipe, optimizer)
                pipe.close()
            pipe = pipeline()
            optimizer = with_float32_moments(torch.optim.AdamW(pipe.parameters(), lr=0.01))
            checkpoint.load(folder, pipe, optimizer)
        x, y = batch(step)
        optimizer.zero_grad()
        pipe.step(x, target=y)
        optimizer.step()
    assert pipe is not None
    pipe.close()
    return pipe.state_dict()


def test_training_goes_on_from_a_checkpoint_as_it_was(tmp_path: Path) -> None:
    straight, again = optimized(4, tmp_path / "none"), optimized(4, tmp_path / "some", stop=2)
    for name, tensor in straight.items():
        assert torch.equal(tensor, again[name]), name


def with_float32_moments(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """As the guide has it: torch's Adam makes its moments in the parameter's dtype."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            moments = {key: torch.zeros_like(p, dtype=torch.float32) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[p] = {"step": torch.zeros(()), **moments}
    return optimizer


def test_torchs_other_optimizers_take_these_gradients_and_adam_says_that_it_does_not() -> None:
    with pipeline() as pipe:
        x, y = batch()
        pipe.step(x, target=y)
        matrices = [p for p in pipe.parameters() if p.dim() == 2 and p.grad is not None]
        for name in ("SGD", "Adagrad", "RMSprop", "Adafactor", "Muon"):
            before = [p.clone() for p in matrices]
            getattr(torch.optim, name)(matrices, lr=0.1).step()
            assert not any(map(torch.equal, before, matrices)), name
        with pytest.raises(RuntimeError, match="expected dtype"):
            torch.optim.AdamW(pipe.parameters()).step()


def test_a_sparse_gradient_is_in_float32_too() -> None:
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4), nn.Linear(4, 9)).bfloat16()
    ids = torch.arange(8) % 5
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "grad_dtype": torch.float32}
    with penstock.pipeline(model, (ids,), loss_fn=F.cross_entropy, schedule="zb-h1", **options) as pipe:
        pipe.step(ids, target=ids)
    assert model[0].weight.grad.is_sparse
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}


def test_a_user_may_set_it_on_some_parameters_alone() -> None:
    model = Net()
    for block in model.blocks:
        block[1].weight.grad_dtype = torch.float32
    expected = {True: by_hand(steps=2), False: by_hand(steps=2, accumulate=None)}
    for name, grad in trained(2, model, grad_dtype=None, schedule="zb-h1").items():
        wanted = expected[name.endswith("1.weight")][name]
        assert name == TIED or grad is wanted is None or torch.equal(grad, wanted), name  # type: ignore[arg-type]


@pytest.mark.parametrize("schedule", ["zb-h1", "dualpipe"])
def test_verify_compares_with_one_device_that_accumulates_alike(schedule: str) -> None:
    x, y = batch()
    options: dict[str, Any] = {"ranks": 2, "microbatches": MICROBATCHES, "schedule": schedule, "loss_fn": loss}
    penstock.verify(Net(), (x,), target=y, grad_dtype=torch.float32, exact=True, **options).raise_if_failed()


def test_verify_sees_a_sum_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = batch()

    def low(pipe: penstock.Pipeline) -> None:
        for parameter in pipe.parameters():
            if parameter.grad is not None:
                parameter.grad.copy_(parameter.grad.bfloat16())

    after_each_step(monkeypatch, low)
    options: dict[str, Any] = {"ranks": 2, "microbatches": MICROBATCHES, "loss_fn": loss, "exact": True}
    report = penstock.verify(Net(), (x,), target=y, grad_dtype=torch.float32, **options)
    assert {row.kind for row in report.failures} == {"gradient"}


def test_parameters_in_float32_are_left_alone() -> None:
    with pipeline() as pipe:
        assert dict(pipe.named_parameters())["scale"].grad_dtype == torch.float32
    with pipeline(Net(dtype=torch.float32), grad_dtype=torch.float64) as pipe:
        assert {p.grad_dtype for p in pipe.parameters()} == {torch.float64}
    with pipeline(Net(dtype=torch.float64)) as pipe:
        assert dict(pipe.named_parameters())[TIED].grad_dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float32"])
def test_other_dtypes_are_refused(dtype: Any) -> None:
    with pytest.raises(ArgumentError, match=r"grad_dtype=.*: expected torch\.float32, torch\.float64 or None"):
        pipeline(grad_dtype=dtype)
