"""A recording is a function of the model and its batch: not of where memory lies, nor of the order of sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from penstock._base.compat import fake_mode, storage_id
from penstock.partition.record.known_values import KnownValues
from penstock.partition.record.operator_effects import Observer
from penstock.partition.units import Lesson
from scaffolding.proofs import proven

TESTS = Path(__file__).parents[2]


def fresh_storages(count: int = 200) -> list[int]:
    """The numbers of memory that is made, given back and made again."""
    return [storage_id(torch.empty(3)) for _ in range(count)]


def test_no_new_memory_is_taken_for_that_of_a_known_value() -> None:
    mode = fake_mode()
    known, value = KnownValues(Observer(), mode, frozenset()), torch.arange(3)
    assert known.assume(value, 0)
    known.expose([value])
    with mode:
        known.refuse_writes(frozenset(fresh_storages()))
    with pytest.raises(Lesson):  # but its own still is
        known.refuse_writes(frozenset([storage_id(mode.from_tensor(value))]))


def test_no_new_memory_is_taken_for_what_was_written_inside_of_a_call() -> None:
    observer = Observer()
    with fake_mode(), observer:
        torch.zeros(3).add_(1)  # gone with the call
        _, written = observer.take_effects()
        assert written
        assert not written & set(fresh_storages())


class CallsMore(nn.Module):
    """Where a microbatch has several rows, it makes an `expand` before the one that crosses the cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.bias, self.scale = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.bias if len(x) == 1 else self.bias.expand(len(x), 6))
        scale = self.scale.expand(len(x), 6)
        for layer in self.layers:
            x = layer(x).tanh() * scale
        return x


def test_sizes_for_which_values_have_other_numbers() -> None:
    torch.manual_seed(0)
    target = torch.randn(5, 6)
    proven(CallsMore(), torch.randn(5, 6), target, ranks=2, microbatches=4, schedule="gpipe")


PRINT_STAGES = """
import warnings
warnings.filterwarnings("ignore")
from zoo import ZOO
from penstock.partition import NoStreams, Partitioner
for name in ("mixtral", "t5", "gpt2", "unet", "tied_three"):
    case = ZOO[name].case()
    made = Partitioner(case.model, 4, streams=NoStreams())(case.args, case.kwargs)
    print(name, made.cuts, [(stage.meta, stage.code) for stage in made.stages])
"""


@pytest.mark.long
def test_every_process_makes_the_same_stages() -> None:
    found = []
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(
            [str(TESTS), os.environ.get("PYTHONPATH", "")]
        )}  # fmt: skip
        command = [sys.executable, "-c", PRINT_STAGES]
        found.append(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
    assert found[0].count("StageMeta") == 5 * 4
    assert found[0] == found[1]
