"""Models of `transformers`, unedited: tiny configurations, random weights, eight blocks; they make their own loss."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import nn

from scaffolding.models import Case
from zoo.entry import ROWS, Entry, noise, tokens

SMALL = {
    "vocab_size": 23,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _build(kind: Any, **config: Any) -> nn.Module:
    model: nn.Module = kind(kind.config_class(**config))
    return model.train()


def _language(model: nn.Module, **inputs: Any) -> Case:
    ids = tokens()
    return Case(model, (), {"input_ids": ids, "labels": ids.clone(), **inputs}, None, None)


def llama() -> Case:
    return _language(_build(transformers.LlamaForCausalLM, **SMALL, num_key_value_heads=1))


def llama_left_padded() -> Case:
    """Rows of different lengths; the position of the first real token is 0."""
    model = _build(transformers.LlamaForCausalLM, **SMALL, attn_implementation="eager")
    mask = torch.ones(ROWS, 5, dtype=torch.int64)
    for row in range(ROWS):
        mask[row, : row % 3] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    return _language(model, attention_mask=mask, position_ids=positions)


def gpt2() -> Case:
    model = _build(
        transformers.GPT2LMHeadModel, vocab_size=23, n_embd=8, n_layer=8, n_head=2, n_positions=16, bos_token_id=0,
        eos_token_id=0, loss_type="ForCausalLMLoss",
    )  # fmt: skip
    return _language(model)


def bert() -> Case:
    types = torch.zeros(ROWS, 5, dtype=torch.int64)
    types[:, 3:] = 1
    model = _build(transformers.BertForMaskedLM, **SMALL)
    return _language(model, attention_mask=torch.ones_like(types), token_type_ids=types)


def t5() -> Case:
    model = _build(
        transformers.T5ForConditionalGeneration, vocab_size=23, d_model=8, d_kv=4, d_ff=12, num_layers=4, num_heads=2,
        decoder_start_token_id=0,
    )  # fmt: skip
    return _language(model)


def mistral() -> Case:
    return _language(_build(transformers.MistralForCausalLM, **SMALL, num_key_value_heads=1, sliding_window=3))


def qwen2() -> Case:
    return _language(_build(transformers.Qwen2ForCausalLM, **SMALL, num_key_value_heads=1, tie_word_embeddings=True))


def mixtral() -> Case:
    model = _build(
        transformers.MixtralForCausalLM, **SMALL, num_key_value_heads=1, num_local_experts=4, num_experts_per_tok=2,
        output_router_logits=True, router_aux_loss_coef=0.1, experts_implementation="batched_mm",
    )  # fmt: skip
    return _language(model)


def vit() -> Case:
    layers = {key: SMALL[key] for key in ("hidden_size", "intermediate_size", "num_hidden_layers")}
    model = _build(
        transformers.ViTForImageClassification, **layers, num_attention_heads=2, image_size=8, patch_size=4,
        num_labels=5, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return Case(model, (), {"pixel_values": noise(3, 8, 8), "labels": torch.randint(5, (ROWS,))}, None, None)


LIBRARY = (
    Entry(llama, "rotary embeddings, grouped queries", 10),
    Entry(llama_left_padded, "padded on the left, positions given", 10),
    Entry(gpt2, "tied embedding, dropout", 8, tied=("transformer.wte.weight",)),
    Entry(bert, "masked tokens, tied embedding", 8, tied=("bert.embeddings.word_embeddings.weight",)),
    Entry(t5, "encoder-decoder", 8, tied=("shared.weight",)),
    Entry(mistral, "sliding window", 10),
    Entry(qwen2, "tied embedding, biases", 8, tied=("model.embed_tokens.weight",)),
    Entry(mixtral, "mixture of experts, auxiliary loss", 10),
    Entry(vit, "pictures", 8),
)
