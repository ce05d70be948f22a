"""The models that are proven: each kind that trains differently on a device, large enough for its usual kernels."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Model(NamedTuple):
    """`loss(model(*args, **kwargs), target)` is what is trained; without a loss the model computes its own."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: Any
    loss: Callable[[Any, Any], Tensor] | None

    def to(self, dtype: torch.dtype) -> Model:
        """With parameters, inputs and target in that dtype; whole numbers stay."""

        def cast(value: Any) -> Any:
            return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

        kwargs = {name: cast(value) for name, value in self.kwargs.items()}
        return Model(self.model.to(dtype), tuple(map(cast, self.args)), kwargs, cast(self.target), self.loss)


LAYERS = 8
"""So that four ranks can have two stages each."""


def token_error(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def mlp(small: bool, rows: int = 16) -> Model:
    """Odd widths, so that rows are not aligned."""
    width = 9 if small else 1031
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    return Model(nn.Sequential(*layers), (torch.randn(rows, width),), {}, torch.randn(rows, width), F.mse_loss)


WIDE_BYTES = 1 << 24
"""What a microbatch of `wide` sends over a cut, if it has two rows."""


def wide(small: bool, rows: int = 16) -> Model:
    """Much to send and little to compute."""
    length, width = (3, 8) if small else (1 << 15, 64)
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(LAYERS)]
    x, y = torch.randn(rows, length, width), torch.randn(rows, length, width)
    return Model(nn.Sequential(*layers), (x,), {}, y, F.mse_loss)


class ConvNet(nn.Module):
    """Convolutions with batch norm, updated in place."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [3] + [width] * LAYERS
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        for block in self.blocks:
            images = block(images)
        return self.head(images.mean((2, 3)))


def convnet(small: bool, rows: int = 16) -> Model:
    width, side = (5, 6) if small else (61, 33)
    return Model(
        ConvNet(width), (torch.randn(rows, 3, side, side),), {}, torch.randint(0, 10, (rows,)), F.cross_entropy
    )


class Skip(nn.Module):
    """Gives a value to the next block, and one to a later block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.main, self.side = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.main(x).tanh(), self.side(x)


class Skips(nn.Module):
    """Values that pass by several blocks before they are used, and a weight that the first and the last block share."""

    REACH = 5

    def __init__(self, width: int) -> None:
        super().__init__()
        blocks = [Skip(width) for _ in range(LAYERS)]
        blocks[-1].main.weight = blocks[0].main.weight
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        sides: list[Tensor] = []
        for index, block in enumerate(self.blocks):
            x, side = block(x)
            sides.append(side)
            if index >= self.REACH:
                x = x * sides[index - self.REACH]
        return x


def skips(small: bool, rows: int = 16) -> Model:
    width = 9 if small else 509
    return Model(Skips(width), (torch.randn(rows, width),), {}, torch.randn(rows, width), F.mse_loss)


class Block(nn.Module):
    """Causal attention and an MLP, each behind a layer norm, with dropout."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """A decoder whose head is tied to its embedding."""

    def __init__(self, vocabulary: int, width: int, length: int, layers: int = LAYERS, dropout: float = 0.1) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.drop(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def gpt(small: bool, rows: int = 16, dropout: float = 0.1) -> Model:
    vocabulary, width, length = (19, 8, 6) if small else (1009, 256, 128)
    ids = torch.randint(0, vocabulary, (rows, length + 1))
    model = GPT(vocabulary, width, length, dropout=dropout)
    return Model(model, (ids[:, :-1].clone(),), {}, ids[:, 1:].clone(), token_error)


def llama(small: bool, rows: int = 16) -> Model:
    """Of the `transformers` library, with rows of several lengths, which a mask tells apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    width, length = (16, 7) if small else (256, 96)
    config = LlamaConfig(
        vocab_size=67, hidden_size=width, intermediate_size=2 * width + 8, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    )  # fmt: skip
    ids = torch.randint(4, 67, (rows, length))
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1::2, -2:] = 0
    kwargs = {"input_ids": ids, "labels": ids.clone(), "attention_mask": mask}
    return Model(LlamaForCausalLM(config), (), kwargs, None, lambda output, _: output.loss)


MODELS: dict[str, Callable[..., Model]] = {
    "mlp": mlp, "convnet": convnet, "gpt": gpt, "llama": llama, "skips": skips, "wide": wide,
}  # fmt: skip


def for_command_line() -> tuple[Any, ...]:
    """A TARGET of `penstock verify`, on the GPU if there is one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    made = gpt(small=True)
    return made.model.to(device), tuple(x.to(device) for x in made.args), made.target.to(device), made.loss
