"""Files of weights, written and read by the ranks of a pool; a model that only fits a stage at a time."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock import checkpoint
from penstock.checkpoint import export as exports
from scaffolding.models import squared_error, token_error
from scaffolding.refusals import refusal_of

WIDTH, LAYERS = 1024, 32


class Spare(nn.Module):
    """A tied model with a parameter, a module and a buffer that no stage uses, a buffer that is not to be saved, and a
    last layer of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.never = nn.Parameter(torch.randn(3, 5))
        self.embed = nn.Embedding(19, 8)
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(8, 8), nn.BatchNorm1d(6))))
        self.pooler = nn.Linear(4, 2)
        self.head = nn.Linear(8, 19, bias=False)
        self.head.weight = self.embed.weight
        self.last = nn.Linear(19, 19, dtype=torch.bfloat16)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("shift", torch.full((19,), 0.5), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        y = self.head(self.layers(self.embed(ids))) + self.shift
        return y + self.last(y.bfloat16()).float()


def spare() -> tuple[Spare, Tensor, Tensor]:
    torch.manual_seed(0)
    ids = torch.randint(0, 19, (12, 7))
    return Spare(), ids[:, :-1].clone(), ids[:, 1:].clone()


def train_spare(model: nn.Module, steps: int, act: Callable[[penstock.Pipeline], Any], **options: Any) -> Any:
    _, x, y = spare()
    with penstock.pipeline(model, (x,), loss=token_error, microbatches=4, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-2)
        for _ in range(steps):
            pipe.step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
        return act(pipe)


def export(rank: int, folder: Path, options: dict[str, Any]) -> dict[str, Tensor]:
    """Trains, writes a file and a checkpoint; returns what this process holds."""

    def act(pipe: penstock.Pipeline) -> dict[str, Tensor]:
        checkpoint.export_safetensors(folder / "new" / "model.safetensors", pipe, metadata={"made": "by a test"})
        checkpoint.save(folder / "checkpoints", pipe)
        return {name: tensor.clone() for name, tensor in pipe.state_dict().items()}

    held: dict[str, Tensor] = train_spare(spare()[0], 2, act, **options)
    return held


def set_buffers(name: str, module: nn.Module) -> None:
    """What the file does not have."""
    if isinstance(module, Spare):
        module.shift.fill_(0.5)
    else:
        raise AssertionError(f"the file has all of {name}")


def read(rank: int, path: Path, how: str) -> dict[str, Tensor]:
    """What this process holds once it has read weights: into a model, or into one on the meta device."""

    def held(pipe: penstock.Pipeline) -> dict[str, Tensor]:
        if how == "import":
            checkpoint.import_safetensors(path, pipe)
        return {**pipe.state_dict(), **dict(pipe.named_buffers())}

    if how == "import":
        model = spare()[0]
        for tensor in model.state_dict().values():
            tensor.zero_()
        return dict(train_spare(model, 0, held))
    with torch.device("meta"):
        model = Spare()
    return dict(
        train_spare(model, 0, held, materialize=checkpoint.init_from_weights(path, model, init_missing=set_buffers))
    )


def refused(rank: int, folder: Path) -> list[str]:
    """What is said of a file of another model, on one rank alone."""

    def act(pipe: penstock.Pipeline) -> list[str]:
        wrong, more = ("wrong", "more") if rank else ("right", "right")
        paths = (folder / wrong / "model.safetensors", folder / more, folder / "nothing")
        said = [refusal_of(checkpoint.import_safetensors, path, pipe) for path in paths]
        return [*said, refusal_of(checkpoint.export_safetensors, folder / "file" / "model.safetensors", pipe)]

    return list(train_spare(spare()[0], 0, act))


def export_without_memory(rank: int, folder: Path) -> str:
    """Rank 0 lacks the memory for one of its own tensors; then the pipeline exports again. Returns what is said."""

    def act(pipe: penstock.Pipeline) -> str:
        path = folder / "model.safetensors"
        fails = [MemoryError("none left"), *[mock.DEFAULT] * 99] if rank == 0 else None
        with (
            mock.patch.object(exports, "to_bytes", side_effect=fails, wraps=exports.to_bytes),
            pytest.raises(penstock.CheckpointError) as said,
        ):
            checkpoint.export_safetensors(path, pipe)
        assert not list(folder.iterdir())
        checkpoint.export_safetensors(path, pipe)
        return str(said.value)

    told: str = train_spare(spare()[0], 1, act)
    return told


class Deep(nn.Module):
    """Large for its purpose: a stage must be distinguishable from all else that a process holds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def write_deep(folder: Path) -> None:
    """The whole model as a file and as a checkpoint, and a narrow one; each layer is filled with its number."""
    for name, width in (("narrow", 2), ("wide", WIDTH)):
        model = Deep(width)
        for index, layer in enumerate(model.layers):
            nn.init.constant_(layer.weight, index)
        with penstock.pipeline(model, (torch.zeros(2, width),), loss=squared_error, microbatches=1) as pipe:
            checkpoint.export_safetensors(folder / name / "file" / "model.safetensors", pipe)
            checkpoint.save(folder / name / "checkpoint", pipe)


def load_deep(rank: int, folder: Path, what: str) -> tuple[list[float], int, int]:
    """What the layers of this rank are filled with, their bytes, and by how much the process grew at its largest."""
    _load_deep(folder / "narrow" / what, 2)  # what torch itself takes when all this is done for the first time
    return _load_deep(folder / "wide" / what, WIDTH)


def _load_deep(path: Path, width: int) -> tuple[list[float], int, int]:
    with torch.device("meta"):
        model = Deep(width)
    x = torch.zeros(2, width)
    before = _start_of_peak()
    rule = checkpoint.init_from_weights(path, model)
    with penstock.pipeline(model, (x,), loss=squared_error, microbatches=1, materialize=rule) as pipe:
        peak = _kilobytes("VmHWM") * 1024
        held = dict(pipe.named_parameters())
        return [p[0, 0].item() for p in held.values()], sum(p.nbytes for p in held.values()), peak - before


def _start_of_peak() -> int:
    """Forgets what the process took at its largest; returns what it takes now, in bytes."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    return _kilobytes("VmRSS") * 1024


def _kilobytes(field: str) -> int:
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1])
