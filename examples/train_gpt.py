"""Your own training loop: a GPT learns to sort, in one process or split over several.

    python examples/train_gpt.py                            # one process, one rank
    penstock run --ranks 2 examples/train_gpt.py            # two processes, the same training

The model reads eight digits, then writes them in order.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

import penstock

DIGITS, LENGTH, WIDTH, HEADS = 10, 8, 64, 4


class Block(nn.Module):
    """Causal self-attention, then a perceptron."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.output = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        split = self.query_key_value(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(split[0], split[1], split[2], is_causal=True)
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        return x + self.perceptron(x)


class GPT(nn.Module):
    """Plain PyTorch: nothing here knows that it will be split."""

    def __init__(self, layers=4):
        super().__init__()
        self.embedding = nn.Embedding(DIGITS, WIDTH)
        self.position = nn.Parameter(torch.randn(2 * LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, DIGITS)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def batch(step, rows=64):
    """Inputs: the digits, then the sorted digits without the last. Targets: the next digit at each position."""
    generator = torch.Generator().manual_seed(step)
    digits = torch.randint(DIGITS, (rows, LENGTH), generator=generator)
    text = torch.cat([digits, digits.sort(dim=1).values], dim=1)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss(logits, targets):
    """Cross-entropy on the sorted half: the digits before it cannot be predicted."""
    return F.cross_entropy(logits[:, LENGTH - 1 :].flatten(0, 1), targets[:, LENGTH - 1 :].flatten())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--schedule", default="1f1b")
    options = parser.parse_args()

    torch.manual_seed(0)  # every process builds the same model
    model = GPT()
    inputs, _ = batch(0)  # only its shapes are used

    with penstock.pipeline(model, (inputs,), schedule=options.schedule, microbatches=8, loss_fn=loss) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=2e-3)  # of this process's stages
        for step in range(1, options.steps + 1):
            inputs, targets = batch(step)
            # Only the first stage's process needs the inputs, and only the last one's the targets.
            args = (inputs,) if pipe.needs_inputs else ()
            result = pipe.step(*args, target=targets if pipe.needs_targets else None)
            optimizer.step()
            optimizer.zero_grad()
            if step % 20 == 0 or step == options.steps:
                value = float(result.loss)  # the same on every rank
                if pipe.is_main_process:
                    print(f"step {step:4d}  loss {value:.6f}", flush=True)


if __name__ == "__main__":
    main()
