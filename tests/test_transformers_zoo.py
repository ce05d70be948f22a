"""Models of `transformers` that nothing here was written for, unedited: random weights, small configs, no downloads."""

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
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2}
BART = {f"{side}_{what}": n for side in ("encoder", "decoder") for what, n in (("layers", 3), ("ffn_dim", 48))}
HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
DEEPSEEK = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16,
    "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8,
    "first_k_dense_replace": 1, "num_key_value_heads": 4,
}  # fmt: skip
SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
MODELS: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {"embedding_size": 16},
    "BartForConditionalGeneration": {"d_model": 32, **BART, **HEADS},
    "BloomForCausalLM": {"n_layer": 4, "n_head": 4},
    "DebertaV2ForMaskedLM": {},
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "MambaForCausalLM": {},
}
"""One of each family: shared layers, encoder and decoder, ALiBi, attention by distance, experts, windows, states."""
"""The class of each, and what its config takes besides SMALL."""

MORE: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {**GROUPED, **MAMBA, "mamba_expand": 2, "attn_layer_indices": [1, 3]},
    "BigBirdForMaskedLM": {"attention_type": "original_full"},
    "CamembertForMaskedLM": {},
    "CodeGenForCausalLM": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4},
    "Cohere2ForCausalLM": {},
    "CohereForCausalLM": {},
    "DistilBertForMaskedLM": {"dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4},
    "ElectraForMaskedLM": {"embedding_size": 32},
    "FNetForMaskedLM": {},
    "FalconForCausalLM": {},
    "FalconH1ForCausalLM": {**GROUPED, **MAMBA, "mamba_d_ssm": 64, "head_dim": 8},
    "GPTBigCodeForCausalLM": {"n_embd": 32, "n_layer": 4, "n_head": 4},
    "GPTJForCausalLM": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "Gemma3ForCausalLM": {**GROUPED, "head_dim": 8},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 8},
    "GlmForCausalLM": {**GROUPED, "head_dim": 8},
    "GptOssForCausalLM": {**GROUPED, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "GraniteForCausalLM": {},
    "HeliumForCausalLM": {**GROUPED, "head_dim": 8},
    "JambaForCausalLM": {
        **GROUPED, "num_experts": 2, "num_experts_per_tok": 1, "use_mamba_kernels": False, "mamba_d_state": 8,
        "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "LongformerForMaskedLM": {"attention_window": 4},
    "MT5ForConditionalGeneration": SMALL_T5,
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
    "MarianMTModel": {"d_model": 32, **BART, **HEADS, "decoder_start_token_id": 0, "forced_eos_token_id": 0},
    "MistralForCausalLM": GROUPED,
    "MobileBertForMaskedLM": {"embedding_size": 16, "intra_bottleneck_size": 16, "true_hidden_size": 16},
    "ModernBertForMaskedLM": {},
    "MptForCausalLM": {"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 32},
    "Olmo2ForCausalLM": {},
    "OlmoForCausalLM": {},
    "OlmoeForCausalLM": {"num_experts": 4, "num_experts_per_tok": 2},
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "PegasusForConditionalGeneration": {"d_model": 32, **BART, **HEADS, "decoder_start_token_id": 0},
    "Phi3ForCausalLM": {},
    "PhiForCausalLM": {},
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "Qwen3MoeForCausalLM": {
        **GROUPED, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    },
    "RobertaForMaskedLM": {},
    "RwkvForCausalLM": {"attention_hidden_size": 32},
    "SmolLM3ForCausalLM": GROUPED,
    "StableLmForCausalLM": {"num_key_value_heads": 4},
    "Starcoder2ForCausalLM": GROUPED,
    "SwitchTransformersForConditionalGeneration": {**SMALL_T5, "num_experts": 4},
    "XGLMForCausalLM": {"d_model": 32, "ffn_dim": 48, "num_layers": 4, "attention_heads": 4},
    "XLMRobertaForMaskedLM": {},
}  # fmt: skip
"""Likewise, in long runs only: most are like one of those."""

LAYERS = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 48}
PATCHES = {**LAYERS, "image_size": 32, "patch_size": 8}
PICTURES: dict[str, dict[str, Any]] = {
    "BeitForImageClassification": PATCHES,
    "ConvNextForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    "ConvNextV2ForImageClassification": {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    "DeiTForImageClassification": PATCHES,
    "Dinov2ForImageClassification": PATCHES,
    "EfficientNetForImageClassification": {
        "width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320,
    },
    "MobileNetV2ForImageClassification": {},
    "RegNetForImageClassification": {
        "embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1], "groups_width": 8,
    },
    "ResNetForImageClassification": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 2, 1]},
    "SegformerForImageClassification": {
        "hidden_sizes": [8, 16, 24, 32], "depths": [1] * 4, "num_attention_heads": [1, 2, 2, 4],
    },
    "SwinForImageClassification": {
        "image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
    },
}  # fmt: skip
SHORT_PICTURES = (
    "ConvNextForImageClassification",
    "Dinov2ForImageClassification",
    "ResNetForImageClassification",
    "SwinForImageClassification",
)
"""One of each family: convolutions, patches, batch norm, windows. The others are like them; in long runs only."""
WHISPER = {
    "d_model": 32, **BART, **HEADS, "vocab_size": 64, "num_mel_bins": 8, "max_source_positions": 16,
    "max_target_positions": 16, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", [*MODELS, *(pytest.param(name, marks=pytest.mark.long) for name in MORE)])
def test_gradients_are_those_of_one_device(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SMALL, **(MODELS | MORE)[name]))
    ids = torch.randint(3, SMALL["vocab_size"], (4, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert verify(model, (), kwargs=inputs, ranks=ranks, microbatches=2).ok


def classified(output: Any, target: Tensor) -> Tensor:
    return F.cross_entropy(output.logits, target)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT_PICTURES else pytest.mark.long) for name in PICTURES]
)
def test_pictures(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**PICTURES[name], num_labels=5))
    inputs = {"pixel_values": torch.randn(4, 3, 32, 32)}
    assert verify(
        model, (), target=torch.randint(5, (4,)), loss_fn=classified, kwargs=inputs, ranks=ranks, microbatches=2
    ).ok


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
def test_speech(ranks: int) -> None:
    torch.manual_seed(0)
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**WHISPER))
    inputs = {"input_features": torch.randn(4, 8, 32), "labels": torch.randint(3, 60, (4, 6))}
    assert verify(model, (), kwargs=inputs, ranks=ranks, microbatches=2).ok


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
    "AlbertForSequenceClassification": ({"embedding_size": 16}, {"labels": CLASSES}),
    "BertForQuestionAnswering": ({}, {"start_positions": CLASSES, "end_positions": CLASSES + 2}),
    "DebertaV2ForTokenClassification": ({}, {"labels": CLASSES[:, None].repeat(1, 8)}),
    "ElectraForTokenClassification": ({"embedding_size": 16}, {"labels": CLASSES[:, None].repeat(1, 8)}),
    "LlamaForSequenceClassification": ({}, {"labels": CLASSES}),
    "RobertaForSequenceClassification": ({}, {"labels": CLASSES}),
}
SHORT_HEADED = ("BertForQuestionAnswering", "ElectraForTokenClassification", "LlamaForSequenceClassification")
"""One of each task."""
"""Other heads than those for tokens: the config's, and what they take."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT_HEADED else pytest.mark.long) for name in HEADED]
)
def test_heads(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    config, labels = HEADED[name]
    ids = torch.randint(3, SMALL["vocab_size"], (4, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **labels}
    assert verify(kind(kind.config_class(**SMALL, **config)), (), kwargs=inputs, ranks=ranks, microbatches=2).ok


VISION = {**LAYERS, "image_size": 16, "patch_size": 8}
SEEING: dict[str, dict[str, Any]] = {
    "Blip2ForConditionalGeneration": {
        "vision_config": VISION,
        "qformer_config": {**SMALL, "encoder_hidden_size": 32},
        "text_config": {"model_type": "opt", "ffn_dim": 48, "word_embed_proj_dim": 32, **SMALL},
        "num_query_tokens": 4,
        "image_token_index": 63,
    },
    "BlipForConditionalGeneration": {
        "vision_config": VISION,
        "text_config": {**SMALL, "projection_dim": 16, "encoder_hidden_size": 32, "is_decoder": True},
        "projection_dim": 16,
        "image_text_hidden_size": 16,
    },
    "LlavaForConditionalGeneration": {
        "vision_config": {"model_type": "clip_vision_model", **VISION},
        "text_config": {"model_type": "llama", **SMALL},
        "image_token_index": 63,
    },
}


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name.startswith("Blip2") else pytest.mark.long) for name in SEEING]
)
def test_language_models_that_see(name: str, ranks: int) -> None:
    """Four tokens stand for the picture; the language model inside makes a key-value cache unless it is told not to."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    ids = torch.randint(3, 60, (4, 8))
    ids[:, :4] = 63
    inputs = {
        "input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clamp(max=60),
        "pixel_values": torch.randn(4, 3, 16, 16),
    }  # fmt: skip
    assert verify(kind(kind.config_class(**SEEING[name])), (), kwargs=inputs, ranks=ranks, microbatches=2).ok


def matched(output: Any, target: Tensor) -> Tensor:
    return (output.logits_per_image - target).square().mean()


@pytest.mark.parametrize("name", ["CLIPModel", pytest.param("SiglipModel", marks=pytest.mark.long)])
def test_two_towers(name: str) -> None:
    """Each microbatch is its own batch of pairs, as in gradient accumulation."""
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(text_config=SMALL, vision_config=VISION))
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
