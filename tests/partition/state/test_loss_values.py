"""What a forward sets beside its result: values that a loss function reads, flags that later blocks read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock import PartitionError, inspect
from penstock._base.compat import FakeTensor
from penstock.partition.record import attempts
from penstock.partition.record.attempts import record
from scaffolding.proofs import proven

WIDTH = 6
LOSSES: list[Tensor] = []


class Expert(nn.Module):
    """Leaves an auxiliary loss in an attribute and in a global list, and a map that is too large to be carried."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.router = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        self.l_aux: Any = None

    def forward(self, x: Tensor) -> Tensor:
        gates = self.router(x).softmax(-1)
        self.l_aux = gates.mean(0).square().sum()
        self.parts = {"first": gates.mean(), "both": [gates.max(), gates.detach().min()]}
        self.map = x.mean() * torch.ones(40, 40)
        LOSSES.append(self.l_aux)
        return x + self.layer(x) * gates[:, :1]


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Expert() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        LOSSES.clear()
        self.count = 0
        for block in self.blocks:
            x = block(x)
            self.count += 1
        return x


def from_attributes(model: Any) -> Tensor:
    return sum(block.l_aux for block in model.blocks) / model.count


def from_nested(model: Any) -> Tensor:
    return sum(block.parts["first"] * block.parts["both"][0] * block.parts["both"][1] for block in model.blocks)


def from_list(model: Any) -> Tensor:
    assert len(LOSSES) == len(model.blocks)
    return torch.stack(LOSSES).sum()


class SummedExperts(Experts):
    """Adds up itself what the blocks leave."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), from_attributes(self)


def test_blocks_that_leave_losses_are_opened_together() -> None:
    """The model is recorded twice, however many blocks it has."""
    with mock.patch.object(attempts, "_record", wraps=attempts._record) as recorded:
        recording = record(SummedExperts(), (torch.randn(4, WIDTH),), {})
    assert recording.unit_spec.opened == {f"blocks.{number}" for number in range(4)}
    assert recorded.call_count == 2


def test_modules_in_blocks_that_leave_losses_are_opened_with_these() -> None:
    """As a mixture of experts in a layer does (DeepSpeed's and fairscale's `l_aux`): twice, however deep they are."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.mixture = nn.Linear(WIDTH, WIDTH), Expert()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mixture(self.attention(x))

    model = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, WIDTH))
    with mock.patch.object(attempts, "_record", wraps=attempts._record) as recorded:
        recording = record(model, (torch.randn(4, WIDTH),), {})
    assert recording.unit_spec.opened == {"0", "0.mixture", "1", "1.mixture"}
    assert recorded.call_count == 2


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(4, WIDTH), torch.randn(4, WIDTH)


def seeded(make: Callable[[], nn.Module]) -> Any:
    torch.manual_seed(0)
    return make()


def plain(model: Any, extra: Callable[[Any], Tensor], microbatches: int) -> list[Tensor]:
    """Loss and gradients by torch alone, in as many microbatches."""
    x, y = batch()
    total = torch.zeros(())
    for a, b in zip(x.clone().chunk(microbatches), y.chunk(microbatches), strict=True):
        loss = F.mse_loss(model(a.clone()), b) + extra(model)
        loss.backward(torch.tensor(1 / microbatches))
        total += loss.detach() / microbatches
    return [total, *(p.grad for p in model.parameters())]


@pytest.mark.parametrize(
    ("extra", "ranks", "schedule"),
    [(from_attributes, 2, "1f1b"), (from_nested, 4, "gpipe"), (from_list, 1, "gpipe"), (from_list, 4, "1f1b")],
)
def test_losses_that_blocks_leave(extra: Callable[[Any], Tensor], ranks: int, schedule: str) -> None:
    model, (x, y) = seeded(Experts), batch()
    before = [dict(vars(block)) for block in model.blocks]

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + extra(model)

    with penstock.pipeline(model, (x,), loss=loss, ranks=ranks, microbatches=4, schedule=schedule) as pipe:
        for _ in range(2):
            model.zero_grad()
            result = pipe.step(x, target=y)
        found = [result.loss, *(p.grad for p in model.parameters())]
    expected = plain(seeded(Experts), extra, 4)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    if ranks > 1:
        assert model.blocks[0].l_aux is before[0]["l_aux"] is None, "outside of the loss nothing has changed"
    assert not any(isinstance(t, FakeTensor) for t in LOSSES)


def test_what_is_not_carried_raises_where_the_loss_uses_it() -> None:
    model, (x, y) = seeded(Experts), batch()

    def loss(output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) + model.blocks[0].map.mean()

    with penstock.pipeline(model, (x,), loss=loss, ranks=2, microbatches=2) as pipe:
        with pytest.raises(
            PartitionError, match=r"the loss reads blocks\.0\.map, .*return it from the model's forward"
        ):
            pipe.step(x, target=y)
        assert not hasattr(model.blocks[0], "map")


# -- flags ------------------------------------------------------------------------------------------------------------


class Told(nn.Module):
    flag = False

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).relu() if self.flag else self.layer(x)


class Telling(nn.Module):
    """Sets a flag that its blocks read."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Told() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            block.flag = index % 2 == 0
            x = block(x)
        return x


def test_a_flag_that_blocks_read() -> None:
    x, y = batch()
    proven(seeded(Telling), x, y, ranks=4, microbatches=4, exact=True)


def test_a_unit_that_must_stay_whole_and_reads_a_flag_is_refused() -> None:
    with pytest.raises(
        PartitionError, match=r"changes 'blocks.0.flag'.* before it runs 'blocks.0'.*out of leaf_modules"
    ):
        inspect(Telling(), (batch()[0],), leaf_modules=["blocks.0"])


def test_blocks_that_do_not_name_what_was_set_stay_whole() -> None:
    model = Telling()
    model.blocks[1] = nn.Linear(WIDTH, WIDTH)
    assert record(model, (batch()[0],), {}).unit_spec.opened == {"blocks.0", "blocks.2", "blocks.3"}


# -- what the loss reads of the model's own ---------------------------------------------------------------------------


def test_a_gradient_that_no_call_shows_is_found_in_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.runtime.loss.loss.LossGuard", lambda elsewhere: contextlib.nullcontext())
    model, (x, y) = seeded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))), batch()
    loss = lambda output, target: F.mse_loss(output, target) + model[0].weight.sum()  # noqa: E731
    with (
        penstock.pipeline(model, (x,), loss=loss, ranks=2, microbatches=2) as pipe,
        pytest.raises(penstock.ArgumentError, match=r"the loss reads '0.weight' of the model"),
    ):
        pipe.step(x, target=y)
