"""Forwards that carry something over from call to call, outside of their blocks, are refused; harmless ones are not."""

from __future__ import annotations

from contextvars import ContextVar
from time import perf_counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import penstock.partition.recorder.attempt as recording
from penstock import PartitionError, inspect, verify
from penstock.partition.state.carried_over import same

WIDTH = 4


def test_recordings_with_other_constants_are_not_the_same() -> None:
    graph, one, other = fx.Graph(), torch.ones(2), torch.zeros(2)
    assert same(graph, graph, ({"c": one}, {"c": one}))
    assert not same(graph, graph, ({"c": one}, {"c": other}))
    assert not same(graph, graph, ({"c": one}, {"d": one}))
    assert same(graph, graph, ({"c": {1}}, {"c": {2}})), "made anew in each forward"
    assert not same(graph, graph, ({"c": {1}}, {"c": (1,)}))


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


class Counts(Chain):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


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

    def __init__(self, decides: Any) -> None:
        super().__init__()
        self.decides, self.named, self.rate, self.turn = decides, {"n": 0}, 1.0, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.named["n"] += 1
        self.turn[0] += 1
        self.shared.calls += 1
        self.rate *= 0.9
        x = super().forward(x)
        return x.detach() if self.decides(self) else x


@pytest.mark.parametrize(
    "decides",
    [
        lambda m: m.calls > 10,
        lambda m: m.calls % 7 == 6,
        lambda m: m.named["n"] * 0.1 >= 1,
        lambda m: m.turn[0] == 9,
        lambda m: m.shared.calls > 10,
        lambda m: m.rate < 0.1,
        lambda m: min(m.calls, 10) == 10,
    ],
)
def test_a_counter_by_which_the_forward_decides_later_is_refused_with_the_line(decides: Any) -> None:
    model = Decides(decides)
    with pytest.raises(PartitionError, match=r"calls'.*, by which it decides at .*test_carried_over\.py:\d+.*frozen"):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)
    assert (model.calls, model.named, model.turn, model.rate) == (0, {"n": 0}, [0], 1.0)


class Timed(nn.Linear):
    """A block that its model counts for, and that counts by itself."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.turns, self.calls = 0, {"own": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["own"] += 1
        return super().forward(x)


class DecidesByABlock(Chain):
    def __init__(self, least: int) -> None:
        super().__init__()
        self.least, self.blocks[2] = least, Timed()

    def forward(self, x: Tensor) -> Tensor:
        block: Any = self.blocks[2]
        block.turns += 1
        x = super().forward(x)
        return x.detach() if self.least >= 0 and block.turns > self.least else x


def test_a_counter_in_a_block_by_which_the_models_forward_decides_later_is_refused_with_the_line() -> None:
    model = DecidesByABlock(10)
    with pytest.raises(PartitionError, match=r"'blocks\.2\.turns', by which it decides at .*test_carried_over\.py:\d+"):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)
    assert model.blocks[2].turns == 0
    model.least = -1
    inspect(model, (torch.randn(4, WIDTH),), stages=2)


class Follows(nn.Linear):
    """A block that decides by what its model counts."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.shared.calls < 10 else x


def test_a_counter_by_which_a_block_decides_later_is_refused() -> None:
    model = Decides(lambda m: False)
    inspect(model, (torch.randn(4, WIDTH),), stages=2)
    model.blocks[1] = Follows(model.shared)
    with pytest.raises(PartitionError, match="forward changes 'calls'"):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)


def test_a_counter_that_is_used_in_another_way_than_to_decide_is_refused() -> None:
    with pytest.raises(PartitionError, match="forward changes"):
        inspect(Decides(lambda m: any(False for _ in range(m.calls))), (torch.randn(4, WIDTH),), stages=2)


class Stamps(Chain):
    """Sets numbers that differ in each call, and looks at them only after it has set them."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.memory = perf_counter()
        return super().forward(x) if self.memory > 0 else x


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


class Measures(nn.Linear):
    """Leaves a number for others to read."""

    def __init__(self, shared: SimpleNamespace) -> None:
        super().__init__(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, x: Tensor) -> Tensor:
        self.shared.calls = x.detach().abs().mean().item()
        return super().forward(x)


class Reads(Measures):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight) * self.shared.calls


def test_a_number_found_from_data_does_not_leave_a_block() -> None:
    shared = SimpleNamespace(calls=0)
    model = nn.Sequential(Measures(shared), Reads(shared), Measures(shared), Reads(shared))
    with pytest.raises(PartitionError, match=r"'0' leaves a number in .*shared\.calls"):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)


@pytest.mark.parametrize(
    ("kind", "place"), [(Counts, "calls"), (CountsElsewhere, r"shared\.calls"), (Remembers, "memory")]
)
def test_state_that_the_next_forward_sees_is_refused_by_name(kind: type[Chain], place: str) -> None:
    with pytest.raises(PartitionError, match=f"forward changes '{place}', and so behaves differently the next time"):
        inspect(kind(), (torch.randn(4, WIDTH),), stages=2)


@pytest.mark.parametrize("kind", [OnlyCounts, Shows, Stamps, Tables])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_the_next_forward_does_not_see_is_kept_equal(kind: type[Chain], schedule: str) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    verify(kind, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, schedule=schedule, exact=True).check()


def test_without_the_second_look_state_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    monkeypatch.setattr(recording, "carried_over", lambda *_: [])
    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    assert not verify(Counts, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, whole_batch=False).ok


class CountsItself(nn.Linear):
    """A block that keeps its state in an object of its own."""

    def __init__(self, state: SimpleNamespace | None = None) -> None:
        super().__init__(WIDTH, WIDTH)
        self.state = state or SimpleNamespace(calls=0, inner=[0])

    def forward(self, x: Tensor) -> Tensor:
        self.state.calls += 1
        self.state.inner[0] += 2
        return super().forward(x) * self.state.calls + self.state.inner[0]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_state_that_one_block_alone_can_reach_is_kept_equal(schedule: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(*[CountsItself() for _ in range(4)])

    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    report = verify(make, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, schedule=schedule, exact=True)
    report.check()
    assert report.whole_batch is not None
    assert "the forward changes what it keeps" in report.whole_batch.text


def test_state_that_two_blocks_share_is_refused() -> None:
    state = SimpleNamespace(calls=0, inner=[0])
    model = nn.Sequential(CountsItself(state), nn.Tanh(), CountsItself(state), nn.Tanh())
    with pytest.raises(PartitionError, match=r"the forward changes '0\.state\."):
        inspect(model, (torch.randn(4, WIDTH),), stages=2)


class Lists(nn.Module):
    sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        Lists.sizes.append(len(x))
        return self.layer(x) * (1 + len(Lists.sizes) % 3)


def test_a_list_in_a_class_which_blocks_share_is_refused_by_name() -> None:
    with pytest.raises(PartitionError, match=r"once the forward has changed 'Lists\.sizes'"):
        inspect(nn.Sequential(*[Lists() for _ in range(4)]), (torch.randn(4, WIDTH),), stages=2)
    assert not Lists.sizes  # recording leaves nothing behind


class Crops(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(WIDTH, 2 * WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.layer(x)[:, 1 : WIDTH + 1]


class Packs(nn.Module):
    """It branches on values, so that it has to run as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        return self.layer(x) if x.isfinite().all() else x


def test_a_second_look_at_a_block_gives_it_inputs_with_the_same_strides() -> None:
    """Packing a cropped value is an operator, packing a packed one is none."""
    torch.manual_seed(0)
    x, y = torch.randn(6, WIDTH), torch.randn(6, WIDTH)
    model = nn.Sequential(Crops(), Packs(), Crops(), Packs())
    verify(model, (x,), target=y, loss_fn=F.mse_loss, ranks=2, microbatches=3, exact=True).check()


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
