"""Small models of each kind, for tests that run each under many schedules."""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaffolding.models import GPT, Case, SkipsTwice, squared_error, token_error

ROWS = 11


def mlp() -> Case:
    layers = [m for _ in range(8) for m in (nn.Linear(33, 33), nn.Tanh())]
    return Case(nn.Sequential(*layers, nn.Linear(33, 5)), _noise(33), {}, torch.randn(ROWS, 5), squared_error)


def tied_gpt_with_dropout() -> Case:
    ids = torch.randint(0, 37, (ROWS, 8))
    model = GPT(vocabulary=37, width=24, layers=8, dropout=0.1)
    return Case(model, (ids[:, :-1],), {}, ids[:, 1:], token_error)


def skips() -> Case:
    return Case(SkipsTwice(33), _noise(33), {}, torch.randn(ROWS, 33), squared_error)


class DigitsNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        widths = [1, 5, 7, 7, 9, 9]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(9, 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def batch_norm_on_digits() -> Case:
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.tensor(digits.images[:ROWS], dtype=torch.float32)[:, None] / 16
    return Case(DigitsNet(), (images,), {}, torch.tensor(digits.target[:ROWS]), F.cross_entropy)


def llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=37, hidden_size=24, intermediate_size=33, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    mask = torch.ones(ROWS, 6, dtype=torch.int64)
    mask[:, -1] = 0
    return Case(LlamaForCausalLM(config), (), {**_tokens(), "attention_mask": mask}, None, None)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=37, n_embd=24, n_layer=4, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0)
    config.loss_type = "ForCausalLMLoss"
    assert config.resid_pdrop > 0
    return Case(GPT2LMHeadModel(config), (), _tokens(), None, None)


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=37, d_model=24, d_kv=8, d_ff=33, num_layers=2, num_heads=3, decoder_start_token_id=0
    )  # fmt: skip
    assert config.dropout_rate > 0
    return Case(T5ForConditionalGeneration(config), (), _tokens(), None, None)


def _noise(width: int) -> tuple[Tensor]:
    return (torch.randn(ROWS, width),)


def _tokens() -> dict[str, Tensor]:
    ids = torch.randint(4, 37, (ROWS, 6))
    return {"input_ids": ids, "labels": ids.clone()}


EXAMPLES = {f.__name__: f for f in (mlp, tied_gpt_with_dropout, skips, batch_norm_on_digits, llama, gpt2, t5)}


DEPTHS = {
    "mlp": 17, "tied_gpt_with_dropout": 8, "skips": 6, "batch_norm_on_digits": 6, "llama": 4, "gpt2": 4, "t5": 4,
}  # fmt: skip
"""How many stages each can be cut into."""
