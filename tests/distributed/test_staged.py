"""Several ranks on one device, whose tensors travel through the host's memory: one device's bits, and nothing waits."""

from __future__ import annotations

from typing import Any

import pytest
import staged_jobs as jobs
import torch.nn.functional as F

import penstock
from penstock.testing.transport_scripts import scripts_for
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.small import batch, mlp
from scaffolding.stand_in_streams import APART

pytestmark = pytest.mark.distributed


SHORT = [("zb-h1", "deep_with_dropout")]
"""It has a tie and a value that every stage uses."""
LONG = [
    ("1f1b", "odd"),
    ("dualpipe", "tied_gpt_with_dropout"),
    ("zb-v", "in_place"),
    ("gpipe", "convnet"),
]


@pytest.mark.parametrize(("schedule", "name"), long_after(len(SHORT), *SHORT, *LONG))
def test_bits_of_one_device(own_pair: Ranks, schedule: str, name: str) -> None:
    reports = own_pair.run(jobs.verify, name, {"schedule": schedule, "microbatches": 4})
    assert len(set(map(str, reports))) == 1, "each rank has the same report"
    assert reports[0][0], reports[0][1]


@pytest.mark.long
def test_four_ranks(own_four: Ranks) -> None:
    for ok, summary, _ in own_four.run(jobs.verify, "deep_with_dropout", {"schedule": "chimera", "microbatches": 8}):
        assert ok, summary


@pytest.mark.long
def test_replicas(own_four: Ranks) -> None:
    """Their sums are those of the same ranks on the CPU, as are the buffers that replicas share."""
    for one in own_four.run(jobs.verify_replicas, "convnet", {"microbatches": 3}):
        assert one.ok, one.summary


@pytest.mark.parametrize("neighbors", [True, False])
def test_conformance(own_pair: Ranks, neighbors: bool) -> None:
    inner = "SharedMemoryTransport" if neighbors else "DistributedTransport"
    assert (
        own_pair.run(jobs.conform, neighbors)
        == [(inner, [script.__name__ for script in scripts_for(collectives=True)])] * 2
    )


def test_a_steady_step_waits_for_copies_alone(own_pair: Ranks) -> None:
    """Four messages each way."""
    assert own_pair.run(jobs.waits_in_a_steady_step, {"schedule": "zb-h1"}) == [{"event" + APART: 4}] * 2


@pytest.mark.parametrize(
    ("choice", "inside"), [("auto", "SharedMemoryTransport"), ("distributed", "DistributedTransport")]
)
def test_without_nccl_it_is_chosen_by_itself_and_said(own_pair: Ranks, choice: str, inside: str) -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=1, microbatches=4, loss=F.mse_loss) as pipe:
        expected = [float(pipe.step(x, target=y).loss) for _ in range(3)]
    for seen in own_pair.run(jobs.by_itself, choice):
        assert seen.transport == inside
        assert seen.losses == expected
        assert seen.first_line.endswith(", staged transport")
        assert "through the host's memory, since torch.distributed was initialized without NCCL" in seen.notes


def test_on_the_host_it_says_that_it_stages_nothing(own_pair: Ranks) -> None:
    for notes in own_pair.run(jobs.notes_on_the_host):
        assert "here it does what 'auto' does" in notes


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ([{}, {}], "ranks [0, 1] would compute on the same accelerator"),
        ([{}, {}], "or pass transport='staged', which takes the way through the host's memory"),
        ([{"transport": "staged"}, {}], "ranks [0, 1] would compute on the same accelerator"),
        ([{"transport": "staged", "pg_options": {}}] * 2, "leave it out where ranks compute on the CPU, or the trans"),
    ],
)
def test_refusals(own_pair: Ranks, options: list[dict[str, Any]], says: str) -> None:
    for said in own_pair.run(jobs.refused, options):
        assert says in said
