"""Where nothing is said, every command cuts a batch into as many microbatches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_line import as_json
from torch import nn

import penstock
from penstock.runtime.batch.batch_dims import Microbatches
from penstock.schedule import MICROBATCHES

TARGET = """
import torch
from torch import nn

def of(rows):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    return model, (torch.randn(rows, 4),), torch.randn(rows, 4), nn.functional.mse_loss

def small():
    return of(5)

def large():
    return of(24)
"""

OF_A_BATCH = {
    "verify": ("verify", "{}"),
    "inspect": ("inspect", "{}"),
    "fabric": ("fabric", "--model", "{}", "--hosts", "2", "--ranks", "2", "--dry-run"),
}
WITHOUT = {
    "simulate": ("simulate", "--schedule", "1f1b", "--ranks", "2"),
    "search": ("search", "--ranks", "2", "--time-limit", "0.1"),
    "draw": ("draw", "--schedule", "1f1b", "--ranks", "2"),
}


def counted(*command: str) -> int:
    """How many microbatches a command's JSON is about."""
    found = as_json(*command)
    if command[0] == "fabric":
        return sum(row["times"] for row in found["transfers"] if row["kind"] == "activation")
    return int(found["microbatches"])


@pytest.fixture
def target(tmp_path: Path) -> str:
    (tmp_path / "model.py").write_text(TARGET)
    return f"{tmp_path / 'model.py'}:"


@pytest.mark.parametrize("name", list(OF_A_BATCH))
def test_a_batch_makes_eight_or_as_many_as_it_has_rows(name: str, target: str) -> None:
    for batch, expected in (("large", MICROBATCHES), ("small", 5)):
        assert counted(*(word.format(target + batch) for word in OF_A_BATCH[name])) == expected, batch


@pytest.mark.parametrize("name", list(WITHOUT))
def test_without_a_batch_they_are_eight(name: str) -> None:
    assert counted(*WITHOUT[name]) == MICROBATCHES


def test_verify_and_inspect_take_pieces_that_a_batch_is_cut_into_already() -> None:
    pieces = [torch.randn(rows, 4) for rows in (2, 1, 3)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    given = (Microbatches(pieces),)
    assert penstock.inspect(model, given).microbatches == 3
    report = penstock.verify(model, given, target=torch.zeros(6, 4), loss_fn=nn.functional.mse_loss, ranks=2)
    assert (report.ok, report.microbatches) == (True, 3)


def test_a_pipeline_has_its_own_number_since_larger_batches_are_to_come() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(16, 4)
    with penstock.pipeline(model, (x[:5],), ranks=2, loss=nn.functional.mse_loss) as pipe:
        assert pipe.step(x[:5], target=x[:5]).sizes == (1,) * 5
        assert pipe.step(x, target=x).sizes == (2,) * 8
