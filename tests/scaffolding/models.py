"""Small models for tests: one seeded builder per kind, with inputs, a target and a loss.

`CASES` lists those written here, `TRANSFORMERS` those from the `transformers` library, made from tiny configurations.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Case(NamedTuple):
    """`loss(model(*args, **kwargs), target)` is a scalar to train on. Batches here have 2 or 4 samples."""

    model: nn.Module | list[nn.Module]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Callable[[Any, Any], Tensor] | None
    """None: the model computes its own loss."""


def squared_error(output: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(output, target)


def token_error(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


class OneLayer(nn.Module):
    """What has one linear layer; a `forward` says what it does with it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)


class Layers(nn.Module):
    """What has linear layers; a `forward` says what it does with them."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))


class Forward(nn.Module):
    """A model from its parts, and a function of it and its inputs."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any) -> Any:
        return self.function(self, *args)


# -- plain networks ---------------------------------------------------------------------------------------------------


def mlp() -> Case:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(7, 7), nn.Tanh())), nn.Linear(7, 3))
    return Case(model, (torch.randn(4, 7),), {}, torch.randn(4, 3), squared_error)


def list_of_layers() -> Case:
    torch.manual_seed(0)
    layers = [nn.Linear(5, 9), nn.ReLU(inplace=True), nn.Linear(9, 9), nn.GELU(), nn.Linear(9, 3)]
    return Case(layers, (torch.randn(4, 5),), {}, torch.randn(4, 3), squared_error)


class Halves(nn.Module):
    """Returns two tensors, which the next module takes as separate arguments."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, a: Tensor, b: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b = a if b is None else b
        return self.left(a) + b, self.right(b) * a


class Join(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a - b


def list_of_stages() -> Case:
    torch.manual_seed(0)
    return Case([Halves(5), Halves(5), Halves(5), Join()], (torch.randn(4, 5),), {}, torch.randn(4, 5), squared_error)


class SkipsTwice(nn.Module):
    """One skip that crosses every cut and is used twice on the way, and another in a dict."""

    def __init__(self, width: int, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        values = {"first": first, "second": self.layers[1](first).tanh()}
        y = self.layers[2](values["second"]) * first
        y = self.layers[3](y + first)
        y = self.layers[4](y + values["second"])
        for layer in self.layers[5:]:
            y = layer(y) - first
        return y


def skips(rows: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(SkipsTwice(7), (torch.randn(rows, 7),), {}, torch.randn(rows, 7), squared_error)


class ConvNet(nn.Module):
    """Convolutions with batch norm and in-place updates."""

    def __init__(self) -> None:
        super().__init__()
        widths = [3, 5, 6, 7, 5]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise(widths)
        )
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, images: Tensor) -> Tensor:
        x = (images - 0.5) / 0.25
        for block in self.blocks:
            x = block(x)
        x = F.relu_(self.norm(x))
        x = F.max_pool2d(x, 2)
        return self.head(x.mean((2, 3)))


def convnet(rows: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(ConvNet(), (torch.randn(rows, 3, 6, 6),), {}, torch.randn(rows, 3), squared_error)


class UNet(nn.Module):
    """Levels down and up, with a skip from each to its counterpart."""

    def __init__(self, widths: tuple[int, ...] = (3, 4, 6, 8)) -> None:
        super().__init__()
        levels = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in levels)
        self.up = nn.ModuleList(nn.Conv2d(a + b, a, 3, padding=1) for a, b in reversed(levels))
        self.middle = nn.Conv2d(widths[-1], widths[-1], 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for conv in self.down:
            skips.append(x)
            x = F.avg_pool2d(F.silu(conv(x)), 2)
        x = self.middle(x)
        for conv in self.up:
            x = F.interpolate(x, scale_factor=2.0)
            x = F.silu(conv(torch.cat([x, skips.pop()], 1)))
        return x


def unet() -> Case:
    torch.manual_seed(0)
    return Case(UNet(), (torch.randn(2, 3, 8, 8),), {}, torch.randn(2, 3, 8, 8), squared_error)


class DictModel(nn.Module):
    """Dict inputs and outputs, a shared layer, a frozen layer, and statistics computed without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.scale = nn.Parameter(torch.randn(6))
        self.register_buffer("offset", torch.randn(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.table = torch.randn(4, 6)  # neither parameter nor buffer

    def forward(self, batch: dict[str, Tensor], flag: bool = False) -> dict[str, Any]:
        x = self.shared(batch["x"]) + self.table
        for layer in self.layers:
            x = layer(self.shared(x)).sigmoid()
        self.count += 1
        with torch.no_grad():
            mean = x.mean(0, keepdim=True)
            spread = (x - mean).abs().max()
        y = self.frozen(x - mean) * self.scale + self.offset * batch["weight"][:, None]
        return {"y": y / (1 + spread), "inner": (x, mean), "flag": flag, "weight": batch["weight"]}


def dicts() -> Case:
    torch.manual_seed(0)
    batch = {"x": torch.randn(4, 6), "weight": torch.rand(4)}

    def loss(output: dict[str, Any], target: Tensor) -> Tensor:
        return F.mse_loss(output["y"], target) + output["inner"][0].square().mean()

    return Case(DictModel(), (batch,), {"flag": True}, torch.randn(4, 6), loss)


# -- transformers of our own ------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Pre-norm attention and feed-forward, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p=self.dropout if self.training else 0.0)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder with its head tied to the embedding, a causal mask, and dropout inside and outside its blocks."""

    def __init__(self, vocabulary: int = 19, width: int = 8, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(16, width)
        self.h = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        mask = positions[:, None] >= positions[None, :]
        x = F.dropout(self.wte(ids) + self.wpe(positions), self.dropout, self.training)
        for block in self.h:
            x = block(x, mask)
        return F.linear(self.norm(x), self.wte.weight)


def gpt(dropout: float = 0.0, rows: int = 2) -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 19, (rows, 6))
    return Case(GPT(dropout=dropout), (ids[:, :-1].clone(),), {}, ids[:, 1:].clone(), token_error)


class EncoderDecoder(nn.Module):
    """An encoder whose result every decoder block uses."""

    def __init__(self, vocabulary: int = 13, width: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(width, 2, 16, 0.0, batch_first=True), layers, enable_nested_tensor=False
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 2, 16, 0.0, batch_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, *, shifted: Tensor) -> Tensor:
        memory = self.encoder(self.embed(source))
        y = self.embed(shifted)
        mask = nn.Transformer.generate_square_subsequent_mask(shifted.shape[1], device=shifted.device)
        for block in self.decoder:
            y = block(y, memory, tgt_mask=mask)
        return self.head(y)


def encoder_decoder() -> Case:
    torch.manual_seed(0)
    source, target = torch.randint(0, 13, (2, 5)), torch.randint(0, 13, (2, 4))
    return Case(EncoderDecoder(), (source,), {"shifted": target}, target.roll(-1, 1), token_error)


class InPlace(nn.Module):
    """Updates values in place after a cut, inside blocks and between them."""

    def __init__(self, width: int = 6, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(inplace=True)) if i % 2 else nn.Linear(width, width)
            for i in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        memory = self.layers[0](x)
        y = self.layers[1](memory.clone())
        memory += self.layers[2](y)
        y = self.layers[3](memory * 2)
        memory[:, 0] = y[:, 1].tanh()
        y = self.layers[4](memory * 1.5)
        for layer in self.layers[5:]:
            memory.add_(y.sigmoid())
            y = layer(memory * 1.0) + memory
        return y


def in_place(rows: int = 4) -> Case:
    torch.manual_seed(0)
    return Case(InPlace(), (torch.randn(rows, 6),), {}, torch.randn(rows, 6), squared_error)


# -- the transformers library -----------------------------------------------------------------------------------------


def _own_loss(output: Any, _target: Any) -> Tensor:
    return output.loss


def _language_case(model: nn.Module, rows: int = 2, **kwargs: Any) -> Case:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(4, 32, (rows, 7), generator=generator)
    return Case(model, (), {"input_ids": ids, "labels": ids.clone(), **kwargs}, None, _own_loss)


def llama(rows: int = 2) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, tie_word_embeddings=True,
    )  # fmt: skip
    mask = torch.ones(rows, 7, dtype=torch.int64)
    mask[1, 5:] = 0
    return _language_case(LlamaForCausalLM(config), rows, attention_mask=mask)


def gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32, n_embd=16, n_layer=4, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return _language_case(GPT2LMHeadModel(config))


def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    return _language_case(T5ForConditionalGeneration(config))


def mixtral() -> Case:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, num_local_experts=4, num_experts_per_tok=2,
    )  # fmt: skip
    return _language_case(MixtralForCausalLM(config))


CASES: dict[str, Callable[[], Case]] = {
    f.__name__: f
    for f in (mlp, list_of_layers, list_of_stages, skips, convnet, unet, dicts, gpt, encoder_decoder, in_place)
}
TRANSFORMERS: dict[str, Callable[[], Case]] = {f.__name__: f for f in (llama, gpt2, t5, mixtral)}
