"""Files of weights, read and written in one process: what they lack or have too much is refused, and how they lie."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import penstock
from penstock import ArgumentError, CheckpointError, checkpoint
from penstock.checkpoint.export import FileEntry, order_entries, write_file
from scaffolding.models import squared_error
from scaffolding.small import WIDTH, batch


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("without", "more", "words"),
    [
        ("1.bias", "", r"does not fit the model \(missing: 1\.bias; unknown to the model: none\)"),
        ("", "2.weight", r"does not fit the model \(missing: none; unknown to the model: 2\.weight\)"),
    ],
)
def test_a_file_of_another_model_is_refused_unless_one_says_otherwise(
    tmp_path: Path, without: str, more: str, words: str
) -> None:
    state = {name: torch.full_like(tensor, 0.5) for name, tensor in model().state_dict().items() if name != without}
    save_file({**state, **({more: torch.zeros(2)} if more else {})}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = model()
    with pytest.raises(ArgumentError, match=words):
        checkpoint.init_from_weights(tmp_path, empty)
    checkpoint.init_from_weights(tmp_path, empty, strict=False)
    with penstock.pipeline(model(), batch()[:1], loss=squared_error, ranks=2, microbatches=2) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        with pytest.raises(ArgumentError, match=words):
            checkpoint.import_safetensors(tmp_path, pipe)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())
        checkpoint.import_safetensors(tmp_path, pipe, strict=False)
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, state.get(name, before[name]))


@pytest.mark.parametrize("name", ["a" * n for n in range(1, 9)])
def test_data_begin_at_whole_words_and_large_elements_come_first(tmp_path: Path, name: str) -> None:
    """A reader may map the file and use the tensors where they lie."""
    tensors: dict[str, Tensor] = {
        name: torch.arange(3, dtype=torch.uint8),
        "half": torch.ones(3).half(),
        "double": torch.arange(2.0).double(),
    }
    entries = order_entries([[FileEntry(key, t.dtype, tuple(t.shape)) for key, t in tensors.items()]], list(tensors))
    data = (tensors[entry.name].view(torch.uint8) for entry in entries)
    write_file(tmp_path / "file.safetensors", entries, {}, data)
    raw = (tmp_path / "file.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for key, tensor in tensors.items():
        assert header[key]["data_offsets"][0] % tensor.element_size() == 0
    assert all(torch.equal(tensors[key], tensor) for key, tensor in load_file(tmp_path / "file.safetensors").items())


def test_of_several_holders_the_first_writes() -> None:
    """The others of a tie have the same values, but only one of them sends."""
    held = [
        [FileEntry("tied", torch.float32, (2,))],
        [FileEntry("tied", torch.float32, (2,)), FileEntry("own", torch.float32, (1,))],
    ]
    assert [(entry.name, entry.owner) for entry in order_entries(held, ["own", "tied"])] == [("own", 1), ("tied", 0)]


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged" * 9)
    damaged = pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file")
    with damaged:
        checkpoint.init_from_weights(tmp_path, model())
    with penstock.pipeline(model(), batch()[:1], loss=squared_error, ranks=2, microbatches=2) as pipe, damaged:
        checkpoint.import_safetensors(tmp_path, pipe)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match="save_file"):
        checkpoint.init_from_weights(tmp_path / "pytorch_model.bin", model())
    index = tmp_path / "model.safetensors.index.json"
    for text, words in (
        ('{"weight_map"', "copy the whole folder"),
        ('{"weight_map": {"w": "a.safetensors"}}', "lacks"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.init_from_weights(tmp_path, model())
