"""A GPT of 6.7 billion parameters, without their memory: to cut and to plan where no such device is.

penstock plan examples/target_gpt.py:target --device h100 --devices 8 --global-batch-size 64
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.mixed, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        q, k, v = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.mixed(self.norm(x)).chunk(3, 2))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(x)


class Gpt(nn.Module):
    def __init__(self, vocabulary=32_000, width=4096, depth=32, heads=32, length=2048):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def target():
    with torch.device("meta"):
        model = Gpt().to(torch.bfloat16)
    ids = torch.randint(1000, (8, 2048))
    return model, (ids,), ids, loss
