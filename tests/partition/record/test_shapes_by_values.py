"""Shapes that follow from the values of inputs: masks that pick rows of activations, packed sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from penstock import PartitionError, pipeline
from penstock.partition import partitioner
from scaffolding.by_hand import assert_same_gradients, step_by_hand

ROWS, LENGTH, WIDTH = 8, 6, 4


def blocks(count: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count))


class Picks(nn.Module):
    """`act(self, h, lengths, mask)` is what its own forward does in the middle."""

    def __init__(self, act: Callable[..., Tensor]) -> None:
        super().__init__()
        self.act, self.embedding, self.before, self.after = act, nn.Embedding(9, WIDTH), blocks(3), blocks(2)
        self.register_buffer("picked", torch.arange(LENGTH) > 1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.before:
            h = block(h)
        h = self.act(self, h, lengths, torch.arange(LENGTH) < lengths[:, None])
        for block in self.after:
            h = block(h)
        return h.sum()


class Recurs(nn.Module):
    def __init__(self, total: int | None, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.embedding, self.before, self.total = nn.Embedding(9, WIDTH), blocks(3), total
        self.rnn, self.head = kind(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 1)

    def forward(self, ids: Tensor, lengths: Tensor) -> Tensor:
        h = self.embedding(ids)
        for block in self.before:
            h = block(h)
        packed = pack_padded_sequence(h, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, lengths = pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=self.total)
        return (self.head(h).squeeze(-1).sum(1) / lengths).sum()


def spread(model: Any, h: Tensor, lengths: Tensor, mask: Tensor) -> Tensor:
    rows = h[mask].tanh()
    spread = torch.zeros_like(h)
    spread[mask] = rows
    return spread


ACTS: dict[str, Callable[..., Tensor]] = {
    "rows": lambda model, h, lengths, mask: h[mask],
    "size": lambda model, h, lengths, mask: h * (h[mask].numel() / 10),
    "and back": spread,
    "nonzero": lambda model, h, lengths, mask: h.flatten(0, 1)[mask.flatten().nonzero().squeeze(-1)],
    "repeated": lambda model, h, lengths, mask: h[:, 0].repeat_interleave(lengths, 0),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    **{name: lambda act=act: Picks(act) for name, act in ACTS.items()},
    "packed": lambda: Recurs(None),
    "packed, gru, padded to a length": lambda: Recurs(LENGTH, nn.GRU),
}


def plain(output: Tensor, _: Any) -> Tensor:
    return output


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(9, (count, ROWS, LENGTH), generator=random)
    return list(zip(ids, torch.randint(1, LENGTH + 1, (count, ROWS), generator=random), strict=True))


def assert_trains_as_plain_torch(model: nn.Module, steps: int, **options: Any) -> None:
    reference, given = copy.deepcopy(model), batches(steps)
    with pipeline(model, given[0], loss_fn=plain, ranks=2, microbatches=4, **options) as pipe:
        for batch in given:
            model.zero_grad()
            reference.zero_grad()
            expected = step_by_hand(reference, batch, torch.zeros(ROWS), plain, 4)
            assert torch.equal(pipe.step(*batch, target=torch.zeros(ROWS)).loss, expected.total)
            assert_same_gradients(model, reference)


@pytest.mark.parametrize("case", MODELS)
def test_shapes_that_follow_from_inputs_are_followed(case: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_plain_torch(MODELS[case](), 2, balance="layers")


@pytest.mark.parametrize("case", ["rows", "packed"])
def test_a_value_of_such_a_shape_crosses_a_cut(case: str) -> None:
    torch.manual_seed(0)
    assert_trains_as_plain_torch(MODELS[case](), 2, cuts=["rnn" if case == "packed" else "after.0"])


@pytest.mark.parametrize(("case", "cut", "most"), [("rows", "before.1", 2), ("packed", "before.1", 2 * LENGTH)])
def test_shapes_that_nothing_reads_are_recorded_twice(
    case: str, cut: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded, record = list[Any](), partitioner.record
    monkeypatch.setattr(partitioner, "record", lambda *args, **kwargs: recorded.append(1) or record(*args, **kwargs))
    torch.manual_seed(0)
    assert_trains_as_plain_torch(MODELS[case](), 8, cuts=[cut])
    assert len(recorded) <= most


UNKNOWN: dict[str, Callable[..., Tensor]] = {
    "activations": lambda model, h, lengths, mask: h[h.sum(-1) > 0],
    "a buffer": lambda model, h, lengths, mask: h[:, model.picked],
    "activations, packed": lambda model, h, lengths, mask: pack_padded_sequence(h, h[:, :, 0].sum(1), True, False)[0],
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_shapes_that_follow_from_anything_else_are_refused_with_the_line(case: str) -> None:
    with pytest.raises(PartitionError, match=rf"depends on the values of a tensor at {__file__}:\d+: "):
        pipeline(Picks(UNKNOWN[case]), batches(1)[0], loss_fn=plain, ranks=2, microbatches=4)


@pytest.mark.filterwarnings("ignore:.*input signatures")
def test_the_oldest_recording_goes_for_a_new_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partitioner, "VARIANTS", 2)
    torch.manual_seed(0)
    assert_trains_as_plain_torch(MODELS["size"](), 2, balance="layers")
