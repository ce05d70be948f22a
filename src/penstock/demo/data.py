"""The training text: the source of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT_EVERY = 10
"""One file in this many is held out: the model never trains on it."""

MAX_BYTES = 8_000_000
"""Maximum size of the text: more than a short run needs, yet quick to read."""

_EXCLUDED = ("test", "idlelib", "site-packages", "encodings", "pydoc_data")
"""Tests, tables, and packages that are not part of the library."""

Batch = tuple[Tensor, Tensor]
"""Inputs and targets, each (rows, context) in int64. The target at each position is the next byte."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """The text as bytes, (length,) in uint8: one part to train on and one held out."""

    train: Tensor
    held_out: Tensor

    def batch(self, step: int, rows: int, context: int) -> Batch:
        """Return the batch for a training step: windows at random positions, the same ones in every process."""
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(self.train) - context, (rows,), generator=generator)
        return _windows(self.train, starts.tolist(), context)

    def held_out_batches(self, count: int, rows: int, context: int) -> list[Batch]:
        """Return windows spread evenly over the held-out text."""
        stride = (len(self.held_out) - context) // (count * rows)
        starts = range(0, count * rows * stride, stride)
        return [_windows(self.held_out, starts[i * rows : (i + 1) * rows], context) for i in range(count)]


def standard_library(max_bytes: int = MAX_BYTES) -> Corpus:
    """Read Python's standard library: its modules in alphabetical order, without tests."""
    root = Path(sysconfig.get_path("stdlib"))
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    remaining = max_bytes
    for index, path in enumerate(sorted(_sources(root))):
        text = path.read_bytes()[:remaining]
        parts[index % HELD_OUT_EVERY == 0].append(text)
        remaining -= len(text)
        if remaining <= 0:
            break
    return Corpus(train=_tensor(parts[False]), held_out=_tensor(parts[True]))


def _sources(root: Path) -> list[Path]:
    """Top-level modules, and those one package down: `json/decoder.py`, but not `lib2to3/pgen2/driver.py`."""
    return [
        path
        for pattern in ("*.py", "*/*.py")
        for path in root.glob(pattern)
        if path.relative_to(root).parts[0] not in _EXCLUDED
    ]


def _tensor(parts: Sequence[bytes]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8)


def _windows(text: Tensor, starts: Sequence[int], context: int) -> Batch:
    windows = torch.stack([text[start : start + context + 1] for start in starts]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
