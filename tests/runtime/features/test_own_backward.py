"""What a module keeps from its forward for its own backward, what it does once more in backward, and what it updates
there."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from penstock import PartitionError, pipeline
from scaffolding.by_hand import assert_steps_by_hand, step_by_hand
from scaffolding.proofs import proven

X, TARGET = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.zeros(8, 6)


class RunsAgain(nn.Module):
    """As the layers of timm's DenseNet with memory_efficient=True."""

    def __init__(self, times: int = 1, reentrant: bool = False) -> None:
        super().__init__()
        self.norm, self.linear, self.times, self.reentrant = nn.BatchNorm1d(6), nn.Linear(6, 6), times, reentrant
        self.checkpoints = True

    def body(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = self.linear(self.norm(x))
        return x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=self.reentrant) if self.checkpoints else self.body(x)


@pytest.mark.parametrize(
    ("reentrant", "options"),
    [(True, {"ranks": 2, "schedule": "gpipe"}), (False, {"ranks": 4}), (False, {"ranks": 2, "recompute": 1})],
    ids=str,
)
def test_batch_norm_that_runs_again_in_backward_ends_with_the_statistics_of_plain_torch(
    reentrant: bool, options: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *(RunsAgain(reentrant=reentrant) for _ in range(3)), nn.BatchNorm1d(6))
    report = proven(model, X, TARGET, microbatches=4, **options)
    assert any(row.kind == "buffer" and "num_batches" in row.name for row in report.rows)


class Checkpointed(nn.Module):
    """As a model of timm after set_grad_checkpointing(): the model itself runs its stages in checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        parts = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh()) for _ in range(4))
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts[0](x)
        for part in self.parts[1:]:
            x = checkpoint(part, x, use_reentrant=False)
        return x


@pytest.mark.parametrize("frozen", [0, 2])
def test_batch_norm_in_a_checkpoint_around_blocks(frozen: int) -> None:
    """Plain torch does not run frozen first blocks again."""
    torch.manual_seed(0)
    model = Checkpointed()
    model.parts[:frozen].requires_grad_(False)
    proven(model, X, TARGET, ranks=2, schedule="gpipe", microbatches=4)


def test_checkpoints_that_are_switched_off_and_on_are_followed() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), *(RunsAgain() for _ in range(4)))
    plain = copy.deepcopy(model)
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, schedule="gpipe", microbatches=4) as pipe:
        for on in (True, False, True):
            for block in (*model[1:], *plain[1:]):
                block.checkpoints = on
            assert_steps_by_hand(pipe, plain, [(X, TARGET)], F.mse_loss, 4)


def test_another_librarys_checkpoint_around_a_norm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of DeepSpeed, say: a forward cannot know that backward runs it again."""
    monkeypatch.setattr("penstock.runtime.features.deferred_norm._in_checkpoint", lambda: False)
    model = nn.Sequential(nn.Linear(6, 6), *(RunsAgain() for _ in range(2)))
    with pytest.raises(PartitionError, match=r"updates buffer '\d.norm[.].*', which its forward takes"):
        proven(model, X, TARGET, ranks=2, schedule="gpipe", microbatches=4)


class Positions(nn.Module):
    """As ConViT's table of relative positions, made anew when the number of patches changes."""

    def __init__(self, persistent: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.zeros(1), persistent=persistent)

    def forward(self, x: Tensor) -> Tensor:
        if self.table.shape[0] != x.shape[1]:
            self.table = torch.arange(x.shape[1]).square().to(x.dtype) / 10
        return self.linear(x + self.table)


def test_a_cache_of_constants_may_be_replaced() -> None:
    torch.manual_seed(0)
    proven(nn.Sequential(*(Positions() for _ in range(4))), X, TARGET, ranks=2, schedule="gpipe", microbatches=4)


def frozen_beginning() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(6, 6), *(RunsAgain() for _ in range(3)))
    model[:2].requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (frozen_beginning, "backward does not run it again, as nothing in it or before it is trained"),
        (
            lambda: nn.Sequential(nn.Linear(6, 6), RunsAgain(times=2), RunsAgain(times=2)),
            r"BatchNorm1d that updates .* called several times .* recompute='always'",
        ),
        (
            lambda: nn.Sequential(Positions(persistent=True), Positions(persistent=True)),
            r"replaces '0.table' by a new tensor.*persistent=False",
        ),
    ],
    ids=["not run again", "called twice", "a cache that is saved"],
)
def test_what_backward_cannot_do_over_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        proven(make(), X, TARGET, ranks=2, schedule="gpipe", microbatches=4)


# -- what a backward updates: a sum is kept; what depends on the order of forwards and backwards is refused ------------


class Noted(torch.autograd.Function):
    """Adds what gradients it sees to a buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: Tensor) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.seen += grad.abs().sum(0)
        return grad, None


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = Noted.apply(self.linear(x), self.seen)
        return made


@pytest.mark.parametrize("schedule", ["gpipe", "zb-h1"])
def test_a_sum_over_gradients_is_that_of_one_device(schedule: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Sums() for _ in range(4)))
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, schedule=schedule, microbatches=4) as pipe:
        pipe.step(X, target=TARGET)
    seen, expected = model[3].get_buffer("seen").clone(), torch.zeros(6)
    for x, target in zip(X.chunk(4), TARGET.chunk(4), strict=True):
        y = model(x)
        expected += torch.autograd.grad(F.mse_loss(y, target) / 4, y)[0].abs().sum(0)
    assert torch.equal(seen, expected)


def test_a_sum_over_gradients_is_refused_where_stages_have_copies() -> None:
    model = nn.Sequential(*(Sums() for _ in range(4)))
    with (
        pipeline(model, (X,), loss=F.mse_loss, ranks=2, schedule="dualpipe", microbatches=4) as pipe,
        pytest.raises(PartitionError, match=r"updates buffer '\d.seen', but this schedule runs several copies"),
    ):
        pipe.step(X, target=TARGET)


def steps(parameter: Tensor) -> None:
    assert parameter.grad is not None
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


def chain(hook: Callable[[Tensor], None], *layers: int) -> nn.Sequential:
    """Some layers step their optimizer as soon as they have a gradient."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(4)))
    for layer in layers:
        model[layer].weight.register_post_accumulate_grad_hook(hook)  # type: ignore[union-attr, operator]
    return model


def test_an_optimizer_in_backward_steps_where_each_backward_follows_its_forward() -> None:
    model, plain = chain(steps, 3), chain(steps, 3)
    with pipeline(model, (X,), loss=F.mse_loss, ranks=2, microbatches=4) as pipe:
        pipe.step(X, target=TARGET)
    step_by_hand(plain, (X,), TARGET, F.mse_loss, 4)
    assert torch.equal(model[3].weight, plain[3].weight)


class DroppedAtTheEnds(nn.Linear):
    """Layer drop that leaves out the first and the last microbatches: they have no backward in a first stage."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x[0, 0] > 0 else x * 1


@pytest.mark.parametrize(
    ("late", "drops", "options"),
    [
        (False, False, {"ranks": 2, "schedule": "zb-h1"}),
        (True, False, {"ranks": 2, "recompute": "always"}),
        (False, True, {"ranks": 4, "schedule": "gpipe"}),
    ],
)
def test_an_optimizer_in_backward_is_refused_elsewhere_whenever_it_begins(
    late: bool, drops: bool, options: dict[str, Any]
) -> None:
    on, x = not late, X.clone()
    x[:, 0] = torch.tensor([-1, -1, 1, 1, 1, 1, -1, -1])
    model = chain(lambda parameter: steps(parameter) if on else None, *([0] if drops else range(4)))
    model[0].__class__ = DroppedAtTheEnds if drops else nn.Linear
    with pipeline(model, (x,), loss=F.mse_loss, microbatches=8, **options) as pipe:
        if late:
            pipe.step(x, target=TARGET)
            on = True
        with pytest.raises(PartitionError, match=r"backward of stage \d updates parameter '\d.weight' by a hook"):
            pipe.step(x, target=TARGET)
