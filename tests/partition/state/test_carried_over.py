"""Forwards that carry something over from call to call, outside of their blocks, are refused; harmless ones are not."""

from __future__ import annotations

from contextvars import ContextVar
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import PartitionError, inspect, verify

WIDTH = 4


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.memory: Any = None
        self.calls = 0
        self.shared = SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class CountsElsewhere(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.shared.calls += 1
        return super().forward(x) * self.shared.calls


class Remembers(Chain):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y if self.memory is None else y + self.memory
        self.memory = y.detach().mean(0)
        return y


class Decides(Chain):
    """Decides by a number that every call changes, in a way that does not show in the first two calls."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = super().forward(x)
        if self.calls > 10:
            return x.detach()
        return x


class Begins(Chain):
    """A part of a model that counts anew in each call, by the name that the model uses for its own count."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls = 0
        return super().forward(x)


class DecidesAround(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls, self.shared = Begins(), 0, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x) if self.calls < 9 else x


class Follows(nn.Linear):
    """A block that decides by what its model counts."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.shared.calls < 10 else x


class CountsFor(Chain):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Follows(self.shared)

    def forward(self, x: Tensor) -> Tensor:
        self.shared.calls += 1
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "place", "line"),
    [
        (Decides, "calls", "if self.calls > 10"),
        (DecidesAround, "calls", "if self.calls < 9 else x"),
        (CountsFor, r"shared\.calls", "if self.shared.calls < 10"),
    ],
)
def test_a_counter_by_which_the_forward_decides_later_is_refused_with_the_line(
    kind: type[Any], place: str, line: str
) -> None:
    model = kind()
    number = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if line in text)
    words = rf"changes '{place}', which it reads at .*test_carried_over\.py:{number}, .*model\.frozen = True"
    with pytest.raises(PartitionError, match=words):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)
    assert (model.calls, model.shared.calls) == (0, 0)


class OnlyCounts(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x)


class Shows(Chain):
    """Leaves something to look at, which it never reads."""

    def forward(self, x: Tensor) -> Tensor:
        self.memory = super().forward(x)
        return self.memory * 2


class Tables(Chain):
    """Makes a table of constants once."""

    def forward(self, x: Tensor) -> Tensor:
        if self.memory is None:
            self.memory = torch.arange(WIDTH) / WIDTH
            self.calls = WIDTH
        return super().forward(x) + self.memory[: self.calls]


@pytest.mark.parametrize(("kind", "place"), [(CountsElsewhere, r"shared\.calls"), (Remembers, "memory")])
def test_state_that_the_next_forward_sees_is_refused_by_name(kind: type[Chain], place: str) -> None:
    with pytest.raises(
        PartitionError, match=f"forward changes '{place}', which it reads at .* and so behaves differently"
    ):
        inspect(kind(), (torch.randn(4, WIDTH),), stages=2)


@pytest.mark.parametrize("kind", [OnlyCounts, Shows, Tables])
def test_what_the_next_forward_does_not_see_is_kept_equal(kind: type[Chain]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    verify(kind, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, schedule="gpipe", exact=True).check()


class CountsItself(nn.Linear):
    """A block that keeps its state in an object of its own."""

    def __init__(self, state: SimpleNamespace | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.state = state or SimpleNamespace(calls=0, inner=[0])

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.inner[0] += 2
        return super().forward(x) * self.state.calls + self.state.inner[0]


def test_state_that_one_block_alone_can_reach_is_kept_equal() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[CountsItself() for _ in range(4)])

    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    report = verify(make, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, schedule="gpipe", exact=True)
    report.check()
    assert report.whole_batch is not None
    assert "the forward changes what it keeps" in report.whole_batch.text


def test_state_that_two_blocks_share_is_refused() -> None:
    state = SimpleNamespace(calls=0, inner=[0])
    model = nn.Sequential(CountsItself(state), nn.Tanh(), CountsItself(state), nn.Tanh())
    with pytest.raises(PartitionError, match=r"the forward changes '0\.state\."):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)


collector: ContextVar[list[Tensor | None] | None] = ContextVar("collector", default=None)


class SelectsByHooks(Chain):
    """As models of transformers give one hidden state of many, by hooks that the first forward installs."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.calls:
            self.calls = 1
            for block in self.blocks:
                block.register_forward_hook(self.collect)
        seen: list[Tensor | None] = []
        token = collector.set(seen)
        y = super().forward(x)
        collector.reset(token)
        assert seen[3] is not None
        return y + seen[3]

    @staticmethod
    def collect(_module: nn.Module, _args: Any, output: Tensor) -> None:
        if (seen := collector.get()) is not None:
            seen.append(output if len(seen) == 3 else None)


def test_a_second_look_leaves_nothing_in_context_variables() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    verify(SelectsByHooks, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, exact=True).check()
