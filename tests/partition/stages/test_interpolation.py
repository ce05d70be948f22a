"""Inputs that differ in a length alone share one recording, and get what a recording of their own would give."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock.partition.partitioner
from penstock import pipeline

WIDTH = 4
LENGTHS = [6, 7, 8, 9, 12, 13, 16, 17, 18, 24, 5]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    record = penstock.partition.partitioner.record
    counting = lambda *args, **options: (found.append(args), record(*args, **options))[1]  # noqa: E731
    monkeypatch.setattr(penstock.partition.partitioner, "record", counting)
    return found


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = {"n_layer": 2, "n_head": 2, "n_embd": 8, "vocab_size": 16, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(**config, bos_token_id=0, eos_token_id=0))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "hidden_size": 8}
    return LlamaForCausalLM(LlamaConfig(**config, intermediate_size=16, vocab_size=16))


@pytest.mark.parametrize(("make", "masked"), [(gpt2, False), (llama, True)])
def test_decoding_of_transformers_is_recorded_for_some_lengths(
    make: Callable[[], nn.Module], masked: bool, recorded: list[Any]
) -> None:
    torch.manual_seed(0)
    model = make().eval()

    def inputs(length: int) -> dict[str, Tensor]:
        given = {"input_ids": torch.randint(0, 16, (2, length))}
        if masked:
            given["attention_mask"] = (torch.arange(length) > torch.tensor([[-1], [1]])).long()
        return given

    with pipeline(model, (), inputs(6), ranks=2, microbatches=1, balance="parameters") as pipe, torch.no_grad():
        recorded.clear()
        for length in (6, 7, 8, 9, 16, 17, 30, 5):
            given = inputs(length)
            assert torch.equal(pipe.predict(**given).logits, model(**given, use_cache=False).logits)
    assert len(recorded) == 3 + 2 + 3 + 1  # 6, 7, 8; 13 and 16; 17, 31 and 32; 5


def assert_predicts_alike(model: nn.Module, cut: str, inputs: Sequence[tuple[Tensor, ...]]) -> None:
    with pipeline(model, inputs[0], ranks=2, microbatches=1, cuts=[cut]) as pipe, torch.no_grad():
        for args in inputs:
            assert torch.equal(pipe.predict(*args), model(*args)), [arg.shape for arg in args]


class Blocks(nn.Module):
    """`act(self, x)` is what its own forward does between blocks."""

    def __init__(self, act: Callable[[Any, Tensor], Tensor], inner: nn.Module | None = None) -> None:
        super().__init__()
        self.act, self.inner, self.shared = act, inner or nn.Identity(), [1.0] * 14 + [2.0] * 99
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x).tanh()
            if number == 1:
                x = self.act(self, x)
        return x


class Pads(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, 0, 0, -x.shape[1] % 8))


def padded(model: Any, x: Tensor) -> Tensor:
    return F.pad(x, (0, 0, 0, -x.shape[1] % 8)).view(len(x), -1, 8, WIDTH).cumsum(2).flatten(1, 2)[:, : x.shape[1]]


def reads_a_unit(model: Any, x: Tensor) -> Tensor:
    y = model.inner(x)
    return y * torch.arange(y.shape[1])[:, None] + y.shape[1]


def positions(model: Any, x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[1])[:, None] / (2 * x.shape[1] + 1)


KINDS: list[tuple[Callable[..., Any], type[nn.Module] | None, bool]] = [
    (positions, None, True),
    (reads_a_unit, nn.Identity, True),
    (lambda model, x: x * 2 if x.shape[1] > 11 else x, None, False),
    (lambda model, x: x * model.shared[x.shape[1]], None, False),
    (lambda model, x: torch.cat([part * 2 for part in x.split(5, 1)], 1), None, False),
    (padded, None, False),
    (reads_a_unit, Pads, False),
]


@pytest.mark.filterwarnings("ignore:.*input signatures")
@pytest.mark.parametrize(("act", "inner", "shares"), KINDS)
def test_no_length_gets_what_was_recorded_for_another(
    act: Any, inner: type[nn.Module] | None, shares: bool, recorded: list[Any]
) -> None:
    torch.manual_seed(0)
    inputs = [(torch.randn(2, length, WIDTH),) for length in LENGTHS]
    assert_predicts_alike(Blocks(act, inner and inner()), "blocks.3", inputs)
    assert len(recorded) == 1 + 9 if shares else len(recorded) >= 1 + len(LENGTHS)


class Masked(nn.Module):
    """Masks are booleans, or what is added, as in `transformers`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Blocks(positions)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.inner(x * mask if mask.dtype == torch.bool else x + mask)


def test_a_length_with_another_dtype_gets_a_recording_of_its_own() -> None:
    kinds = [(6, torch.bool), (7, torch.bool), (8, torch.bool), (9, torch.float32), (10, torch.bool)]
    inputs = [(torch.randn(2, length, WIDTH), torch.ones(2, length, 1, dtype=dtype)) for length, dtype in kinds]
    assert_predicts_alike(Masked(), "inner.blocks.3", inputs)


def test_dimensions_that_change_together_are_recorded(recorded: list[Any]) -> None:
    inputs = [(torch.randn(rows, length, WIDTH),) for rows, length in [(2, 6), (3, 7), (4, 8), (5, 9)]]
    assert_predicts_alike(Blocks(positions), "blocks.3", inputs)
    assert len(recorded) == 1 + 4


@pytest.mark.filterwarnings("ignore:.*input signatures")
def test_evaluation_does_not_push_out_training(monkeypatch: pytest.MonkeyPatch, recorded: list[Any]) -> None:
    monkeypatch.setattr("penstock.runtime.step.bound_schedules.CACHED_SCHEDULES", 3)
    model, x = Blocks(positions), torch.randn(2, 6, WIDTH)
    with pipeline(model, (x,), loss=F.mse_loss, ranks=2, microbatches=1) as pipe:
        pipe.step(x, target=x)
        first = next(iter(pipe.session.bound_schedules))
        before = len(recorded)
        for length in range(6, 14):
            longer = x[:, :1].repeat(1, length, 1)
            assert torch.equal(pipe.predict(longer), model(longer))
        assert len(recorded) == before + 5
        assert first in list(pipe.session.bound_schedules)
        assert len(list(pipe.session.bound_schedules)) == 3
