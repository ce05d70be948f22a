"""Layers that a forward leaves out by chance: the same ones for any number of ranks, and the gradients of plain torch."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

import penstock
from models import squared_error
from penstock import pipeline, verify
from penstock.errors import PartitionError
from penstock.runtime.streams import key_of, mix
from penstock.stages import ties

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


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("make", [opt, bart, wav2vec2])
def test_layers_are_dropped_as_in_plain_torch(make: Callable[[], Any], ranks: int, schedule: str) -> None:
    """Against the unsplit model's own forward, which draws the same numbers: nothing of ours runs in it."""
    torch.manual_seed(0)
    model, inputs = make()
    plain = copy.deepcopy(model)
    with pipeline(
        model, (), inputs, ranks=ranks, microbatches=MICROBATCHES, schedule=schedule, seed=SEED
    ) as pipe:
        shared = ties(pipe.stages)
        for step in range(3):  # the first agrees on layouts, and teaches the split of the backward
            model.zero_grad()
            plain.zero_grad()
            result = pipe.step(**inputs)
            losses = []
            for k in range(MICROBATCHES):
                with mock.patch("torch.rand", drawn(step, k)):
                    loss = plain(**{name: value[k : k + 1].clone() for name, value in inputs.items()}).loss
                (loss / MICROBATCHES).backward()
                losses.append(loss.detach())
            assert torch.equal(result.loss, sum(value / MICROBATCHES for value in losses))
            found = dict(pipe.all_parameters())
            for name, parameter in plain.named_parameters():
                grad = found[name].grad if name in found else None
                assert (grad is None) == (parameter.grad is None), name
                if grad is not None and name in shared:  # its terms are added in another order
                    torch.testing.assert_close(grad, parameter.grad, rtol=0, atol=1e-6 * float(grad.abs().max()))
                elif grad is not None:
                    assert torch.equal(grad, parameter.grad), name


def drawn(step: int, microbatch: int) -> Callable[..., Tensor]:
    """`torch.rand` that draws what the pipeline draws, in the order of the forward: for `rand`, `rand_1` and so on."""
    names: Iterator[str] = itertools.chain(["rand"], (f"rand_{n}" for n in itertools.count(1)))
    real = torch.rand

    def rand(*args: Any) -> Tensor:
        seed = mix(mix(SEED, step, microbatch), key_of(next(names)), 0)
        return real(*args, generator=torch.Generator().manual_seed(seed))

    return rand
