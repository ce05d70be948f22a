"""A checkpoint may come from anybody, and may be damaged: nothing in it runs, and one line names the file."""

from __future__ import annotations

import contextlib
import fractions
import io
import os
import pickle
import pickletools
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.distributed.checkpoint.metadata import Metadata
from typer.testing import CliRunner

import penstock
from penstock import ArgumentError, CheckpointError, checkpoint
from penstock.checkpoint import unpickling
from penstock.checkpoint.storage import Reader
from penstock.checkpoint.unpickling import unpickle
from penstock.cli import app
from scaffolding.models import squared_error
from scaffolding.small import WIDTH, batch


class Harm:
    """Makes a folder when unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def made() -> penstock.Pipeline:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH))
    return penstock.pipeline(model, batch()[:1], loss=squared_error, ranks=2, microbatches=3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with made() as pipe:
        return checkpoint.save(tmp_path_factory.mktemp("saved"), pipe)


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "step-00000001"))


def refused(path: Path) -> str:
    """The one line with which a checkpoint is refused, without and with a model."""
    said = []
    with pytest.raises(CheckpointError) as error:
        checkpoint.export_checkpoint(path, path.parent / "out.safetensors")
    said.append(str(error.value))
    with made() as pipe, pytest.raises(CheckpointError) as error:
        checkpoint.load(path, pipe)
    said.append(str(error.value))
    assert not [line for line in said if "\n" in line]
    return said[-1]


def with_metadata(path: Path, change: Callable[[Metadata], Any]) -> None:
    found = pickle.loads((path / ".metadata").read_bytes())
    change(found)
    (path / ".metadata").write_bytes(pickle.dumps(found))


def test_metadata_run_nothing(copy: Path, tmp_path: Path) -> None:
    (copy / ".metadata").write_bytes(pickle.dumps(Harm(tmp_path / "harm")))
    assert f"{copy}/.metadata is damaged" in refused(copy)
    with_harm = pickle.dumps({"a": Harm(tmp_path / "harm")})
    (copy / ".metadata").write_bytes(with_harm)
    assert "posix.mkdir, which could run any code" in refused(copy)
    assert not (tmp_path / "harm").exists()


def test_what_is_stored_runs_nothing_unless_trusted(tmp_path: Path) -> None:
    with made() as pipe:
        path = checkpoint.save(tmp_path / "saved", pipe, extra=Harm(tmp_path / "harm"))
    with made() as pipe, pytest.raises(ArgumentError, match="pass weights_only=False"):
        checkpoint.load(path, pipe)
    with pytest.raises(ArgumentError, match=r"'rest' needs a class that is not allowed \(it calls posix\.mkdir"):
        checkpoint.export_checkpoint(path, tmp_path / "out.safetensors")
    assert not (tmp_path / "harm").exists()
    with made() as pipe:
        assert checkpoint.load(path, pipe, weights_only=False)
    (tmp_path / "harm").rmdir()
    command = ["export", str(path), str(tmp_path / "out.safetensors"), "--no-weights-only"]
    assert CliRunner().invoke(app, command).exit_code == 0


def test_the_bytes_around_what_is_stored_run_nothing(copy: Path, tmp_path: Path) -> None:
    """torch itself reads them with all powers."""
    packed = io.BytesIO()
    torch.save(Harm(tmp_path / "harm"), packed)
    (copy / "own.distcp").write_bytes(packed.getvalue())

    def point(found: Metadata) -> None:
        for index, stored in found.storage_data.items():
            if index.fqn == "rest":
                stored.relative_path, stored.offset, stored.length = "own.distcp", 0, len(packed.getvalue())

    with_metadata(copy, point)
    assert f"{copy}/own.distcp is damaged" in refused(copy)
    assert not (tmp_path / "harm").exists()


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "almost whole": lambda data: data[:-1],
    "random": lambda data: random.Random(7).randbytes(len(data)),
    "foreign": lambda data: pickle.dumps({"state_dict_metadata": {}}),
    "zeros": lambda data: bytes(len(data)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_files_are_named(copy: Path, kind: str) -> None:
    metadata, (tensors,) = copy / ".metadata", copy.glob("*.distcp")
    whole = metadata.read_bytes()
    metadata.write_bytes(DAMAGE[kind](whole))
    assert refused(copy).startswith(f"{metadata} is damaged or not a checkpoint file (")
    metadata.write_bytes(whole)
    tensors.write_bytes(DAMAGE[kind](tensors.read_bytes()))
    assert tensors.name in refused(copy)


def set_items(found: Metadata, **values: Any) -> None:
    """Sets attributes of all that has them."""
    for item in (*found.state_dict_metadata.values(), *found.storage_data.values()):
        for name, value in values.items():
            if hasattr(item, name):
                setattr(item, name, value)


LIES: dict[str, Callable[[Metadata], None]] = {
    "size": partial(set_items, size=torch.Size([10**15])),
    "path": partial(set_items, relative_path="../../etc/passwd"),
    "types": lambda found: found.state_dict_metadata.update(dict.fromkeys(found.state_dict_metadata, 1)),  # type: ignore[arg-type]
    "storage": lambda found: setattr(found, "storage_data", [1]),
}


@pytest.mark.parametrize("lie", LIES)
def test_metadata_promise_no_more_than_there_is(copy: Path, lie: str) -> None:
    with_metadata(copy, LIES[lie])
    assert f"{copy}/.metadata is damaged" in refused(copy)


def test_any_mutation_is_refused_or_read(saved: Path, copy: Path) -> None:
    draw, files = random.Random(0), [copy / ".metadata", *copy.glob("*.distcp")]
    for _ in range(60):
        file = draw.choice(files)
        data = bytearray((saved / file.name).read_bytes())
        for _ in range(draw.choice((1, 3, 30))):
            data[draw.randrange(len(data))] = draw.randrange(256)
        file.write_bytes(data)
        with contextlib.suppress(ArgumentError, CheckpointError):
            checkpoint.export_checkpoint(copy, copy.parent / "out.safetensors")
        shutil.copy(saved / file.name, file)


def test_plain_values_come_back() -> None:
    values = {
        "tensor": torch.arange(3.0),
        "half": torch.ones(2, dtype=torch.bfloat16),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "types": (torch.float64, torch.device("cpu"), torch.Size([1])),
        "numbers": (numpy.float64(2), numpy.arange(3), 1j, {1}, frozenset([2]), range(3)),
        "python": random.getstate(),
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([torch.ones(1)]), [1]).state_dict(),
        "path": Path("a/b"),
    }
    assert str(unpickle(pickle.dumps(values))) == str(values)


@pytest.mark.parametrize(
    "data",
    [
        b"cbuiltins\nlist\n(cbuiltins\nrange\n(J\x00\xca\x9a;tRtR.",  # list(range(10**9))
        b"cbuiltins\nbytearray\n(J\x00\xca\x9a;tR.",
        b"(" + b"cbuiltins\nbytearray\n(J\x00\x00\x10\x00tR" * 8 + b"l.",  # eight of 1 MiB
        b"Nr\xff\xff\xff\x7f.",  # whose table of values would take 32 GB
        b"Np2000000000\n.",
    ],
)
def test_a_few_bytes_do_not_fill_the_memory(data: bytes) -> None:
    pickletools.dis(data, io.StringIO())
    with pytest.raises(pickle.UnpicklingError, match=r"too long|numbers a value"):
        unpickle(data)


def test_operations_are_counted_and_a_class_can_be_allowed(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpickling, "MAX_VALUES", 100)
    with pytest.raises(pickle.UnpicklingError, match="it has more than 100 operations"):
        unpickle(b"(" + b"]" * 100 + b"l.")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="is damaged"):
        Reader(copy, weights_only=False)._unpickle("rest", b"damaged")
    data = pickle.dumps(fractions.Fraction(1, 3))
    with pytest.raises(pickle.UnpicklingError, match=r"fractions\.Fraction"):
        unpickle(data)
    with torch.serialization.safe_globals([fractions.Fraction]):
        assert unpickle(data) == fractions.Fraction(1, 3)
