"""A small residual network learns to tell shapes apart: data loader, augmentation, batch norm, accuracy.

    python examples/train_vision.py                            # one process, one rank
    penstock run --ranks 2 examples/train_vision.py            # two processes, the same training

What is random has a seed for each epoch and picture, so that no figure depends on ranks, workers or restarts.
"""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset

import penstock

SIZE, SHAPES = 16, ("disk", "ring", "plus", "cross")


class Shapes(Dataset):
    """Pictures [1, SIZE, SIZE] of a shape somewhere in noise; with an epoch, also mirrored and shifted at random."""

    def __init__(self, number, seed, epoch=None):
        self.number, self.seed, self.epoch = number, seed, epoch

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        label = index % len(SHAPES)
        center, radius = torch.randint(5, SIZE - 5, (2,), generator=generator), 4 + torch.rand(1, generator=generator)
        y, x = torch.arange(SIZE)[:, None] - center[0], torch.arange(SIZE) - center[1]
        far = (x**2 + y**2).sqrt()
        inside = {
            "disk": far < radius,
            "ring": (far - radius + 1).abs() < 1,
            "plus": (far < radius) & (torch.minimum(x.abs(), y.abs()) < 1),
            "cross": (far < radius) & (torch.minimum((x - y).abs(), (x + y).abs()) < 1),
        }[SHAPES[label]]
        picture = inside.float() + 0.3 * torch.randn(SIZE, SIZE, generator=generator)
        if self.epoch is not None:
            generator.manual_seed((self.seed + self.epoch) * 1_000_000 + index)
            flip, shift = torch.randint(2, (1,), generator=generator), torch.randint(-2, 3, (2,), generator=generator)
            picture = picture.flip(1) if flip else picture
            picture = picture.roll(shift.tolist(), (0, 1))
        return picture[None], label


class Block(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out))
        self.two = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Identity() if channels == out and stride == 1 else nn.Conv2d(channels, out, 1, stride)

    def forward(self, x):
        return F.relu(self.two(F.relu(self.one(x))) + self.shortcut(x))


def network():
    """Plain PyTorch: nothing here knows that it will be split."""
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()),
        *(Block(16, 16), Block(16, 16), Block(16, 32, stride=2), Block(32, 32), Block(32, 64, stride=2), Block(64, 64)),
        nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, len(SHAPES))),
    )


def batches(epoch, number):
    """Shuffled and augmented, differently in each epoch."""
    generator = torch.Generator().manual_seed(epoch)
    return DataLoader(Shapes(number, seed=1, epoch=epoch), 64, shuffle=True, generator=generator)


def accuracy(pipe, loader):
    """The share of pictures that are recognized. The last batch may be smaller."""
    right = total = 0
    for pictures, labels in loader:
        logits = pipe.predict(pictures, outputs="all")  # on every rank; batch norms in evaluation mode
        right += int((logits.argmax(1).cpu() == labels).sum())
        total += len(labels)
    return right / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--pictures", type=int, default=1024)
    options = parser.parse_args()

    torch.manual_seed(0)  # every process builds the same model
    example, _ = next(iter(batches(0, options.pictures)))
    held_out = DataLoader(Shapes(200, seed=2), 64)
    # A batch norm sees a microbatch at a time; deferred, its running statistics are those of whole batches.
    with penstock.pipeline(
        network(), (example,), microbatches=4, loss_fn=F.cross_entropy, deferred_batch_norm=True
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, 0.1, epochs=options.epochs, steps_per_epoch=len(batches(0, options.pictures))
        )
        for epoch in range(1, options.epochs + 1):
            for pictures, labels in batches(epoch, options.pictures):
                result = pipe.step(pictures, target=labels)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss, right = float(result.loss), accuracy(pipe, held_out)
            if pipe.is_main_process:
                print(f"epoch {epoch}  loss {loss:.6f}  held out {right:.1%} right", flush=True)


if __name__ == "__main__":
    main()
