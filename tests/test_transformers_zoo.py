"""Models of `transformers` that nothing here was written for, unedited: random weights, small configs, no downloads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

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
MODELS: dict[str, dict[str, Any]] = {
    "AlbertForMaskedLM": {"embedding_size": 16},
    "BartForConditionalGeneration": {"d_model": 32, **BART, **HEADS},
    "BloomForCausalLM": {"n_layer": 4, "n_head": 4},
    "CohereForCausalLM": {},
    "DebertaV2ForMaskedLM": {},
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DistilBertForMaskedLM": {"dim": 32, "hidden_dim": 48, "n_layers": 4, "n_heads": 4},
    "ElectraForMaskedLM": {"embedding_size": 32},
    "FalconForCausalLM": {},
    "GPTJForCausalLM": {"n_embd": 32, "n_layer": 4, "n_head": 4, "rotary_dim": 4},
    "GPTNeoXForCausalLM": {},
    "Gemma2ForCausalLM": {**GROUPED, "head_dim": 8},
    "GemmaForCausalLM": {**GROUPED, "head_dim": 8},
    "GraniteForCausalLM": {},
    "MambaForCausalLM": {},
    "MistralForCausalLM": GROUPED,
    "OPTForCausalLM": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "OlmoForCausalLM": {},
    "Phi3ForCausalLM": {},
    "PhiForCausalLM": {},
    "Qwen2ForCausalLM": GROUPED,
    "Qwen3ForCausalLM": {**GROUPED, "head_dim": 8},
    "RobertaForMaskedLM": {},
    "StableLmForCausalLM": {"num_key_value_heads": 4},
}
"""The class of each, and what its config takes besides SMALL."""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_one_device(name: str, ranks: int) -> None:
    torch.manual_seed(0)
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**SMALL, **MODELS[name]))
    ids = torch.randint(3, SMALL["vocab_size"], (4, 8))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    assert verify(model, (), kwargs=inputs, ranks=ranks, microbatches=2).ok
