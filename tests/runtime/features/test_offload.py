"""Activations on the host: everything that backward needs goes there and comes back, with the same bits and strides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from penstock import pipeline, verify
from penstock._base.errors import ArgumentError
from penstock.runtime.features.offload import HostCopy, Offload
from scaffolding.everything import WIDTH, everything, everything_goes, inputs_alive
from scaffolding.models import ConvNet, squared_error
from scaffolding.proofs import proven
from scaffolding.small import batch, mlp, training_stages


@pytest.fixture(autouse=True)
def _everything_goes() -> Iterator[None]:
    with everything_goes:
        yield


CASES = [
    ("gpipe", 4, 1, "never"),
    ("interleaved-1f1b", 2, 2, 2),
    ("zb-v", 2, 2, "except_last"),
]


@pytest.mark.parametrize(("schedule", "ranks", "chunks", "recompute"), CASES)
def test_the_result_is_that_of_one_device(schedule: str, ranks: int, chunks: int, recompute: Any) -> None:
    model, x, y = everything(ranks * chunks)
    options: dict[str, Any] = {"microbatches": 5, "offload": True, "recompute": recompute, "exact": True}
    proven(model, x, y, schedule=schedule, ranks=ranks, stages_per_rank=chunks, **options)


class Counted:
    """Follows what goes to the host and comes back."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.gone: list[Tensor] = []
        self.back = 0
        leave, come = HostCopy.__init__, HostCopy.get

        def leaving(away: HostCopy, tensor: Tensor, *args: Any) -> None:
            self.gone.append(tensor)
            leave(away, tensor, *args)

        def coming(away: HostCopy) -> Tensor:
            self.back += 1
            return come(away)

        monkeypatch.setattr(HostCopy, "__init__", leaving)
        monkeypatch.setattr(HostCopy, "get", coming)


def saved_by_hand(model: nn.Module, x: Tensor, y: Tensor) -> tuple[int, int]:
    """How many tensors autograd saves in a forward and its loss, besides parameters, and how many of them differ."""
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        squared_error(model(x), y)
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    places = [t.data_ptr() for t in saved if t.untyped_storage().data_ptr() not in held]
    return len(places), len(set(places))


def test_everything_but_parameters_goes_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Tanh()))), batch()
    expected, different = saved_by_hand(model, x, y)
    assert expected > 6 > different
    with pipeline(model, (x,), schedule="gpipe", ranks=1, microbatches=4, loss=squared_error, offload=True) as pipe:
        counted = Counted(monkeypatch)
        pipe.step(x, target=y)
    assert len(counted.gone) == 4 * different, "what several calls save goes once"
    assert counted.back == 4 * expected
    held = {p.untyped_storage().data_ptr() for p in model.parameters()}
    assert not held & {t.untyped_storage().data_ptr() for t in counted.gone}


@pytest.mark.parametrize(("choice", "stages"), [(True, {0, 1}), ([False, True], {1}), ({0: True}, {0}), (False, set())])
def test_a_choice_a_stage(choice: Any, stages: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, (x, y) = mlp(4), batch()
    with pipeline(model, (x,), schedule="gpipe", ranks=2, microbatches=4, loss=squared_error, offload=choice) as pipe:
        counted = Counted(monkeypatch)
        pipe.step(x, target=y)
        assert counted.back >= len(counted.gone)
        assert bool(counted.gone) == bool(stages)
        assert {
            s.index for s in training_stages(pipe) if any(isinstance(each, Offload) for each in s.features)
        } == stages
        counted.gone.clear()
        pipe.evaluate(x, target=y)
        assert not counted.gone


def test_what_is_away_is_not_on_the_device() -> None:
    """On two stages of two layers, when the last of four microbatches is in the last layer."""
    assert inputs_alive(4, ranks=2) == [4, 4, 4, 4]
    assert inputs_alive(4, ranks=2, offload=True) == [4, 0, 1, 1]  # the batch itself is there until the step ends
    # The last microbatch is still in the last stage's forward.
    assert inputs_alive(4, ranks=2, recompute="always") == [4, 0, 4, 1]
    assert inputs_alive(4, ranks=2, offload=True, recompute="always") == [4, 0, 1, 1]


def test_batch_norm_and_channels_last() -> None:
    torch.manual_seed(0)
    net = ConvNet().to(memory_format=torch.channels_last)
    x, y = torch.randn(8, 3, 6, 6).to(memory_format=torch.channels_last), torch.randn(8, 3)
    proven(net, x, y, ranks=2, microbatches=4, offload=True, exact=True)


class Mixes(nn.Module):
    """Has a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("sparse", torch.eye(WIDTH).to_sparse())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.sparse.mm(self.sparse, x.T).T))


def test_sparse_buffers_stay() -> None:
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    proven([Mixes(), Mixes()], x, y, ranks=2, microbatches=4, offload=True)


def test_what_draws_after_it_was_saved_is_refused() -> None:
    x, y = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(1))
    model = [nn.Linear(WIDTH, WIDTH), nn.RReLU(), nn.Linear(WIDTH, WIDTH)]
    with pytest.raises(ArgumentError, match=r"nn.RReLU .* offload=\{0: False\}"):
        verify(model, (x,), target=y, loss_fn=squared_error, ranks=2, cuts=["2"], microbatches=4, offload=True)
    proven(model, x, y, ranks=2, cuts=["2"], microbatches=4, offload={0: False, 1: True})
