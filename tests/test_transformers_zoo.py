"""Models of `transformers` that nothing here was written for, unedited: random weights, small configs, no downloads.

One of each family; `benchmarks/published` verifies all that the library has.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from penstock import verify

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
BART = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 48))}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {"embedding_size": 16},
    "BartForConditionalGeneration": {"d_model": 32, **BART, **HEADS},
    "BloomForCausalLM": {},
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "MambaForCausalLM": {},
}
"""The class of each, and what its config takes besides SMALL.

One of each family: shared layers, encoder and decoder, ALiBi, experts, windows, states.
"""
MORE: dict[str, dict[str, Any]] = {
    "DebertaV2ForMaskedLM": {},
    "GptOssForCausalLM": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "JambaForCausalLM": {
        **GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "LongformerForMaskedLM": {"attention_window": 4},
    "SwitchTransformersForConditionalGeneration": {**SMALL_T5, "num_experts": 4},
}  # fmt: skip
"""Likewise, in long runs only: attention by distance (with another head: below), attention sinks, states beside
attention, local attention, experts taken singly.
"""

LAYERS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
PICTURES: dict[str, dict[str, Any]] = {
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    "Dinov2ForImageClassification": {**LAYERS, "image_size": 32, "patch_size": 8},
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    "SwinForImageClassification": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    },
}  # fmt: skip
"""One of each family: convolutions (of which ResNet has some, too), patches, batch norm, windows."""
WHISPER = {
    "d_model": 32, **BART, **HEADS, "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "ranks"),
    [*((name, 2) for name in MODELS), *(pytest.param(name, 4, marks=pytest.mark.long) for name in MODELS | MORE)],
)
def test_gradients_are_those_of_one_device(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{**SMALL, "num_hidden_layers": ranks, **(MODELS | MORE)[name]}))
    ids = torch.randint(3, SMALL["vocab_size"], (4, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert verify(model, (), kwargs=inputs, ranks=ranks, microbatches=2).ok


def classified(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * n.startswith("Conv")) for n in PICTURES])
def test_pictures(name: str) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**PICTURES[name], num_labels=5))
    inputs = {"pixel_values": torch.randn(4, 3, 32, 32)}
    target = torch.randint(5, (4,))
    assert verify(model, (), target=target, loss_fn=classified, kwargs=inputs, ranks=2, microbatches=2).ok


@pytest.mark.long  # BART is an encoder and a decoder, too, and wav2vec 2.0 listens
def test_speech() -> None:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    inputs = {"input_features": torch.randn(4, 8, 32), "labels": torch.randint(3, 60, (4, 6))}
    assert verify(model, (), kwargs=inputs, ranks=2, microbatches=2).ok


@pytest.mark.parametrize("masked", [False, pytest.param(True, marks=pytest.mark.long)])
def test_speech_with_a_loss_that_counts_frames(masked: bool) -> None:
    """Without a mask, wav2vec 2.0 makes one of ones and counts them: `ctc_loss` wants real lengths."""
    torch.manual_seed(0)
    convolutions: dict[str, Any] = {"conv_dim": (8, 8), "conv_kernel": (4, 3), "conv_stride": (2, 2)}
    convolutions |= {"num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 2}
    model = transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**LAYERS, **convolutions, vocab_size=20))
    inputs = {"input_values": torch.randn(4, 200), "labels": torch.randint(3, 20, (4, 3))}
    if masked:
        inputs["attention_mask"] = (torch.arange(200) < torch.tensor([[200], [160], [200], [120]])).long()
    assert verify(model, (), kwargs=inputs, ranks=2, microbatches=2, reduction="sum").ok


CLASSES = torch.tensor([0, 1, 1, 0])
HEADED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "BertForQuestionAnswering": ({}, {"start_positions": CLASSES, "end_positions": CLASSES + 2}),
    "ElectraForTokenClassification": ({"embedding_size": 16}, {"labels": CLASSES[:, None].repeat(1, 8)}),
    "LlamaForSequenceClassification": ({}, {"labels": CLASSES}),
}
"""Other heads than those for tokens: the config's, and what they take."""


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.long] * (n[0] != "L")) for n in HEADED])
def test_heads(name: str) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config, labels = HEADED[name]
    ids = torch.randint(3, SMALL["vocab_size"], (4, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels}
    assert verify(kind(kind.config_class(**SMALL, **config)), (), kwargs=inputs, ranks=2, microbatches=2).ok


VISION = {**LAYERS, "image_size": 16, "patch_size": 8}
SEEING = {
    "vision_config": VISION,
    "qformer_config": {**SMALL, "encoder_hidden_size": 32},
    "text_config": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, **SMALL},
    "num_query_tokens": 4,
    "image_token_index": 63,
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_a_language_model_that_sees(ranks: int) -> None:
    """Four tokens stand for the picture; the language model inside makes a key-value cache unless it is told not to."""
    torch.manual_seed(0)
    ids = torch.randint(3, 60, (4, 8))
    ids[:, :4] = 63
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clamp(max=60),
        "pixel_values": torch.randn(4, 3, 16, 16),
    }  # fmt: skip
    model = transformers.Blip2ForConditionalGeneration(transformers.Blip2Config(**SEEING))
    assert verify(model, (), kwargs=inputs, ranks=ranks, microbatches=2).ok


def matched(output: Any, target: Tensor) -> Tensor:
    return (output.logits_per_image - target).square().mean()


def test_two_towers() -> None:
    """Each microbatch is its own batch of pairs, as in gradient accumulation."""
    torch.manual_seed(0)
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=SMALL, vision_config=VISION))
    ids = torch.randint(3, 60, (4, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(4, 3, 16, 16)}
    assert verify(model, (), target=torch.zeros(4, 1), loss_fn=matched, kwargs=inputs, ranks=2, microbatches=2).ok


def test_evaluations_are_compared_where_a_model_has_put_hooks_into_its_blocks() -> None:
    """transformers does in the first forward that returns all hidden states, and notes that it has."""
    torch.manual_seed(0)
    two: dict[str, Any] = {"depths": [1, 1], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2]}
    two |= {"sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [7, 3], "strides": [4, 2]}
    config = transformers.SegformerConfig(**two, num_encoder_blocks=2, decoder_hidden_size=16, num_labels=3)
    inputs = {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(3, (4, 32, 32))}
    model = transformers.SegformerForSemanticSegmentation(config)
    report = verify(model, (), kwargs=inputs, ranks=2, microbatches=2)
    assert report.ok
    assert any(row.name.endswith(" in evaluation") for row in report.rows)
    assert not report.notes


def test_a_head_that_looks_for_labels_that_count() -> None:
    """DeBERTa's sequence classification does, in the model's own forward."""
    torch.manual_seed(0)
    model = transformers.DebertaV2ForSequenceClassification(transformers.DebertaV2Config(**SMALL))
    ids = torch.randint(3, SMALL["vocab_size"], (4, 8))
    given: dict[str, Any] = {"ranks": 2, "microbatches": 2}
    assert verify(model, (), kwargs={"input_ids": ids, "labels": CLASSES}, **given).ok
    assert verify(model, (), target=CLASSES, loss_fn=classified, kwargs={"input_ids": ids}, **given).ok
