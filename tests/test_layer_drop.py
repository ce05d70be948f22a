"""Layers that a forward leaves out by chance: the same for any number of ranks, and the gradients of plain torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from penstock import pipeline, profile
from penstock._base.errors import PartitionError
from penstock._base.stages import ties
from penstock.partition import NoStreams, Partitioner
from penstock.partition.record import attempts
from penstock.runtime.exact.streams import hash_name, mix
from scaffolding.everything import everything_goes
from scaffolding.models import Layers, squared_error
from scaffolding.proofs import proven
from scaffolding.representatives import long_after

SEED, MICROBATCHES = 5, 4
SMALL = {"vocab_size": 23, "dropout": 0.0, "max_position_embeddings": 16, "pad_token_id": 0}


def opt() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.OPTConfig(
        **SMALL, hidden_size=8, ffn_dim=12, num_hidden_layers=4, num_attention_heads=2, word_embed_proj_dim=8,
        layerdrop=0.5,
    )  # fmt: skip
    return transformers.OPTForCausalLM(config).train(), _text()


def bart() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.BartConfig(
        **SMALL, d_model=8, encoder_ffn_dim=12, decoder_ffn_dim=12, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_layerdrop=0.5, decoder_layerdrop=0.5,
        decoder_start_token_id=2, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.BartForConditionalGeneration(config).train(), _text()


def wav2vec2() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.Wav2Vec2Config(
        hidden_size=8, intermediate_size=12, num_hidden_layers=4, num_attention_heads=2, conv_dim=(16, 16),
        conv_kernel=(10, 3), conv_stride=(5, 2), num_feat_extract_layers=2, num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4, mask_time_prob=0.0, num_labels=5, layerdrop=0.5, classifier_proj_size=8,
        hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
    )  # fmt: skip
    model = transformers.Wav2Vec2ForSequenceClassification(config).train()
    model.freeze_feature_encoder()
    return model, {"input_values": torch.randn(4, 400), "labels": torch.randint(5, (4,))}


def _text() -> dict[str, Tensor]:
    ids = torch.randint(4, 23, (4, 6))
    return {"input_ids": ids, "labels": ids.clone()}


ALWAYS = {("opt", 4, "zb-h1"), ("bart", 2, "1f1b"), ("wav2vec2", 4, "gpipe")}
CELLS = [
    pytest.param(make, ranks, schedule, marks=() if (make.__name__, ranks, schedule) in ALWAYS else pytest.mark.long)
    for make in (opt, bart, wav2vec2)
    for ranks in (1, 2, 4)
    for schedule in ("1f1b", "gpipe", "zb-h1")
]


@pytest.mark.parametrize(("make", "ranks", "schedule"), CELLS)
@pytest.mark.usefixtures("one_thread")
def test_layers_are_dropped_as_in_plain_torch(make: Callable[[], Any], ranks: int, schedule: str) -> None:
    """Against the unsplit model's own forward, which draws the same numbers: nothing of ours runs in it."""
    torch.manual_seed(0)
    model, inputs = make()
    plain = copy.deepcopy(model)
    with pipeline(model, (), inputs, ranks=ranks, microbatches=MICROBATCHES, schedule=schedule, seed=SEED) as pipe:
        shared = ties(pipe.stages)
        for step in range(3):  # the first agrees on layouts, and teaches the split of the backward
            model.zero_grad()
            plain.zero_grad()
            result = pipe.step(**inputs)
            losses = []
            for k in range(MICROBATCHES):
                with mock.patch("torch.rand", drawn(step, k, DRAWN_IN[make.__name__])):
                    loss = plain(**{name: value[k : k + 1].clone() for name, value in inputs.items()}).loss
                (loss / MICROBATCHES).backward()
                losses.append(loss.detach())
            assert torch.equal(result.loss, sum(value / MICROBATCHES for value in losses))
            found = dict(pipe.session.model_parts.all_parameters())
            for name, parameter in plain.named_parameters():
                grad = found[name].grad if name in found else None
                assert (grad is None) == (parameter.grad is None), name
                if grad is not None and name in shared:  # its terms are added in another order
                    torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-6 * float(grad.abs().max()))
                elif grad is not None:
                    assert torch.equal(grad, parameter.grad), name


DRAWN_IN = {"opt": ["model.decoder"], "bart": ["model.encoder", "model.decoder"], "wav2vec2": ["wav2vec2.encoder"]}
"""Modules in whose own forward layers are dropped: three in each of two, or four."""


def drawn(step: int, microbatch: int, modules: list[str]) -> Callable[..., Tensor]:
    """`torch.rand` that draws what the pipeline draws, in the order of the forward."""
    names = iter([f"{module}()#{n}" for module in modules for n in range(4 if len(modules) == 1 else 3)])
    real = torch.rand

    def rand(*args: Any) -> Tensor:
        seed = mix(mix(SEED, step, microbatch), hash_name(next(names)), 0)
        return real(*args, generator=torch.Generator().manual_seed(seed))

    return rand


class Dropping(nn.Module):
    """Blocks around which `way(self, number, block, x)` decides; batch norm inside."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        kinds = (nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Dropout(0.2))
        self.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(kinds)) for _ in range(5))
        self.again = nn.Sequential(nn.Linear(7, 7), nn.Dropout(0.2))
        self.head, self.way = nn.Linear(7, 7), way

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = self.way(self, number, block, x)
        return self.head(x)


def by_tensor(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
    return x if self.training and torch.rand([]) < 0.5 else x + block(x)


def by_number(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
    return x + block(x) if not (self.training and torch.rand(1).item() <= 0.5) else x


@everything_goes
def check(way: Callable[..., Tensor], **options: Any) -> None:
    torch.manual_seed(0)
    given = {"ranks": 2, "microbatches": 4, "seed": 3, **options}
    proven(Dropping(way), torch.randn(8, 7), torch.randn(8, 7), **given)


@pytest.mark.parametrize("way", [by_tensor, by_number])
def test_ways_to_ask(way: Callable[..., Tensor]) -> None:
    check(way)


@pytest.mark.parametrize(
    "options",
    [
        *({"recompute": "always", "schedule": "zb-h1"}, {"deferred_batch_norm": True}),
        *long_after(0, {"recompute": 2}, {"offload": True}, {"check_finite": True}),
        pytest.param({"compile": {"backend": "eager"}}, marks=[pytest.mark.long, pytest.mark.filterwarnings("ignore")]),
    ],
    ids=str,
)
def test_with_other_features(options: dict[str, Any]) -> None:
    check(by_tensor, **options)


def test_what_such_layers_take_is_measured() -> None:
    """As a pipeline of a model of usual size does when it is built."""
    model, inputs = opt()
    units = profile(model, kwargs=inputs, budget_seconds=0.1).units
    assert [unit.name for unit in units if unit.like] == [f"model.decoder.layers.{number}" for number in (1, 2, 3)]
    assert all(unit.forward_seconds > 0 for unit in units)


def test_nothing_is_dropped_in_evaluation_or_at_rate_zero() -> None:
    def never(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return x if torch.rand([]) < 0.0 else x + block(x)

    for model in (Dropping(by_tensor).eval(), Dropping(never)):
        with pipeline(model, (torch.randn(4, 7),), ranks=2, microbatches=2, loss=squared_error) as pipe:
            assert not any(stage.branches for stage in pipe.stages)


def test_a_layer_that_is_called_often_draws_the_same_masks_whatever_was_left_out_before() -> None:
    """The call that is left out on the first stage counts on the second."""

    def shared(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        x = x + block(x)
        return x if torch.rand([]) < 0.5 else x + self.again(x)

    check(shared, ranks=4)


def test_ways_that_differ_in_more_are_refused() -> None:
    def both(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) if torch.rand([]) < 0.5 else self.head(x)

    def constant(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * (2 if torch.rand([]) < 0.5 else 3)

    def shape(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        y = torch.cat([x, block(x)]) if torch.rand([]) < 0.5 else x
        return y[: len(x)]

    def in_place(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        y = x if torch.rand([]) < 0.5 else x + block(x)
        return y.mul_(2) + x

    def few(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        self.left = 0 if number == 0 else self.left
        if torch.rand([]) < 0.5 and self.left < 2:  # no more than two are left out
            self.left += 1
            return x
        return x + block(x)

    def nested(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        return x + block(x) if torch.rand([]) < 0.5 and torch.rand([]) < 0.5 else x

    def frozen(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(not torch.rand([]) < 0.5):
            return x + block(x)

    def scaled(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        self.dropped = [] if number == 0 else self.dropped
        self.dropped.append(bool(torch.rand([]) < 0.5))
        if self.dropped[-1]:
            return x
        return x + block(x) * (2 if number > 1 and self.dropped[-3] else 1)

    def skipping(self: Dropping, number: int, block: nn.Module, x: Tensor) -> Tensor:
        self.outputs = [] if number == 0 else self.outputs
        self.outputs.append(None if torch.rand([]) < 0.5 else block(x))
        if self.outputs[-1] is None:
            return x
        earlier = self.outputs[-3] if number > 1 else None  # a skip connection, as in a U-Net
        return x + self.outputs[-1] if earlier is None else x + self.outputs[-1] + earlier

    for way in (both, constant, shape, in_place, few, nested, frozen, scaled, skipping):
        with pytest.raises(PartitionError, match=r"branches on a random number at .*test_layer_drop.py:\d+.*rate to 0"):
            check(way)


class Resetting(Dropping):
    """What is left out takes all before it along, which a path that skips everything doesn't show."""

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for block in self.blocks:
            x = first if torch.rand([]) < 0.5 else x + block(x)
        return self.head(x)


class Alternating(Dropping):
    """Two chains, of which every other block is part."""

    def forward(self, x: Tensor) -> Tensor:
        chains = [x, 2 * x]
        for number, block in enumerate(self.blocks):
            chains[number % 2] = by_tensor(self, number, block, chains[number % 2])
        return self.head(chains[0] + chains[1])


@pytest.mark.parametrize(("kind", "recordings"), long_after(2, (Dropping, 5), (Alternating, 5), (Resetting, 7)))
def test_how_often_such_a_model_is_recorded(kind: type[Dropping], recordings: int) -> None:
    """Five times, however many layers it has; more often if that leaves open what a layer passes on."""
    torch.manual_seed(0)
    model, x = kind(by_tensor), torch.randn(8, 7)
    with mock.patch.object(attempts, "_record", wraps=attempts._record) as record:
        Partitioner(model, 2, streams=NoStreams(), balance="flops")((x,))
    assert record.call_count == recordings
    proven(model, x, torch.randn(8, 7), ranks=2, microbatches=4, seed=3)


class AllStates(Layers):
    """Sums what entered each layer: where one is left out, the same tensor twice."""

    def forward(self, x: Tensor) -> Tensor:
        states: tuple[Tensor, ...] = ()
        for layer in self.layers:
            states += (x,)
            if torch.rand([]) < 0.4:
                continue
            x = x + torch.relu(layer(x))
        return x + sum(states)


@pytest.mark.parametrize("cuts", [["layers.2", "layers.4"]])
def test_a_tensor_that_crosses_a_cut_twice_is_added_in_another_order(cuts: list[str]) -> None:
    torch.manual_seed(0)
    model, x, y = AllStates(8, 6), torch.randn(8, 8), torch.randn(8, 8)
    report = proven(model, x, y, cuts=cuts, ranks=len(cuts) + 1, microbatches=4)
    gradients = [row for row in report.rows if row.kind == "gradient"]
    assert any(row.verdict == "close" for row in gradients)
    assert all(row.verdict == "equal" for row in report.rows if row.kind == "output")
