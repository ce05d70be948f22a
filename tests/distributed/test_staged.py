"""Several ranks on one device, whose tensors travel through the host's memory: one device's bits, and nothing waits."""

from __future__ import annotations

from typing import Any
from unittest import mock

import mesh_jobs
import pytest
import torch
import torch.nn.functional as F

import penstock
from distributed import jobs
from penstock._base.errors import PenstockError
from penstock.distributed.world import World
from penstock.runtime.execute import transport_choice
from penstock.runtime.execute.engine import Engine
from penstock.runtime.transport.neighbors import Neighbors
from penstock.runtime.transport.staging import StagedTransport
from penstock.testing import check_transport
from scaffolding import stand_in
from scaffolding.ranks import Ranks
from scaffolding.representatives import long_after
from scaffolding.small import batch, mlp
from scaffolding.stand_in import DEVICE, StandIn
from scaffolding.stand_in_streams import APART

pytestmark = pytest.mark.distributed


STAGED: dict[str, Any] = {"devices": DEVICE, "transport": "staged"}

STEADY = 3
"""After so many steps all is known that a pipeline learns while it runs."""


def verify(rank: int, name: str, options: dict[str, Any]) -> tuple[bool, str, list[str]]:
    stand_in.install()
    return jobs.verify(rank, name, {**STAGED, **options})


def conform(rank: int, neighbors: bool) -> tuple[str, list[str]]:
    """The conformance checks, with shared memory inside or without."""
    stand_in.install()
    device = torch.device(DEVICE, 0)
    with mock.patch.object(Neighbors, "supported", return_value=neighbors):
        engine = Engine(World(2, rank, (0, 1)), [device] * 2, 0, "staged")
    assert engine.control.groups is not None
    engine.control.groups.make((0, 1))  # as for a parameter that both hold
    with mock.patch.object(StandIn, "data_ptr", address):  # so that alignment can be seen
        checked = check_transport({rank: engine.transports[rank]}, device)
    inner = type(engine.transports.pop(rank).messages).__name__  # type: ignore[attr-defined]
    engine.close()
    return inner, checked


def address(tensor: StandIn) -> int:
    return tensor.values.data_ptr()


def waits_in_a_steady_step(rank: int) -> dict[str, int]:
    """What the host, and the thread that sends, waited for."""
    stand_in.install()
    x, y = batch(8)
    given: dict[str, Any] = {"microbatches": 4, "loss": F.mse_loss, "broadcast_loss": False, "schedule": "zb-h1"}
    with penstock.pipeline(mlp(), (x,), **STAGED, **given) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.01)
        for step in range(STEADY + 1):
            if step == STEADY:
                pipe.session.control.staging.synchronize()
                stand_in.waits.clear()
            optimizer.zero_grad()
            pipe.step(x, target=y)
            optimizer.step()
        pipe.session.control.staging.synchronize()
        return dict(stand_in.waits)


def by_itself(rank: int, choice: Any) -> tuple[list[float], str, str]:
    """What is said of the transport where each rank has a device of its own, and the job has gloo alone."""
    stand_in.install()
    x, y = batch(8)
    apart = mock.patch.object(transport_choice, "accelerator_id", return_value=f"accelerator {rank}")
    with apart, penstock.pipeline(
        mlp(), (x,), microbatches=4, loss=F.mse_loss, devices=DEVICE, transport=choice
    ) as pipe:  # fmt: skip
        losses = [float(pipe.step(x, target=y).loss) for _ in range(3)]
        carries = pipe.session.engine.transports[rank]
        inside = carries.messages if isinstance(carries, StagedTransport) else carries
        return losses, type(inside).__name__, "\n".join([repr(pipe), *pipe.notes])


def refused(rank: int, options: list[dict[str, Any]]) -> str:
    """What each rank says of its own options, or of what the other has said. The model stays where it is."""
    stand_in.install()
    (x, _), model = batch(8), mlp()
    given = {"microbatches": 4, "loss": F.mse_loss, "devices": DEVICE, **options[rank]}
    with pytest.raises(PenstockError) as error:
        penstock.pipeline(model, (x,), **given)
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu"}
    return str(error.value)


SHORT = [("zb-h1", "deep_with_dropout")]
"""It has a tie and a value that every stage uses."""
LONG = [
    ("dualpipe", "tied_gpt_with_dropout"),
    ("zb-v", "in_place"),
    ("gpipe", "convnet"),
]


@pytest.mark.parametrize(("schedule", "name"), long_after(len(SHORT), *SHORT, *LONG))
def test_bits_of_one_device(own_pair: Ranks, schedule: str, name: str) -> None:
    reports = own_pair.run(verify, name, {"schedule": schedule, "microbatches": 4})
    assert len(set(map(str, reports))) == 1, "each rank has the same report"
    assert reports[0][0], reports[0][1]


def verify_replicas(rank: int) -> mesh_jobs.Verified:
    stand_in.install()
    return mesh_jobs.verify(rank, "convnet", (2, 2), {"microbatches": 3, **STAGED})


@pytest.mark.long
def test_replicas_of_four_ranks(own_four: Ranks) -> None:
    """Their sums are those of the same ranks on the CPU, as are the buffers that replicas share."""
    for one in own_four.run(verify_replicas):
        assert one.ok, one.summary


@pytest.mark.parametrize("neighbors", [True, False])
def test_conformance(own_pair: Ranks, neighbors: bool) -> None:
    inner = "SharedMemoryTransport" if neighbors else "DistributedTransport"
    assert own_pair.run(conform, neighbors) == [(inner, jobs.SCRIPTS)] * 2


def test_a_steady_step_waits_for_copies_alone(own_pair: Ranks) -> None:
    """Four messages each way."""
    assert own_pair.run(waits_in_a_steady_step) == [{"event" + APART: 4}] * 2


@pytest.mark.parametrize(
    ("choice", "inside"), [("auto", "SharedMemoryTransport"), ("distributed", "DistributedTransport")]
)
def test_without_nccl_it_is_chosen_by_itself_and_said(own_pair: Ranks, choice: str, inside: str) -> None:
    x, y = batch(8)
    with penstock.pipeline(mlp(), (x,), ranks=1, microbatches=4, loss=F.mse_loss) as pipe:
        expected = [float(pipe.step(x, target=y).loss) for _ in range(3)]
    for losses, transport, said in own_pair.run(by_itself, choice):
        assert (losses, transport) == (expected, inside)
        assert said.splitlines()[0].endswith(", staged transport")
        assert "through the host's memory, since torch.distributed was initialized without NCCL" in said


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            [{}, {}],
            [
                "ranks [0, 1] would compute on the same accelerator (2 ranks have 1 in all)",
                "Start no more ranks on a machine than it has accelerators",
                "or pass transport='staged', which takes the way through the host's memory",
            ],
        ),
        ([{"transport": "staged"}, {}], ["ranks [0, 1] would compute on the same accelerator"]),
        (
            [{"transport": "staged", "pg_options": {}}] * 2,
            ["leave it out where ranks compute on the CPU"],
        ),
        (
            [{}, {"devices": "cpu"}],
            ["rank 0 computes on 'standin', and rank 1 on 'cpu'", "pass the same devices= on every rank"],
        ),
    ],
)
def test_refusals(own_pair: Ranks, options: list[dict[str, Any]], says: list[str]) -> None:
    for said in own_pair.run(refused, options):
        assert [words for words in says if words not in said] == [], said


def test_on_the_host_it_says_that_it_stages_nothing() -> None:
    with penstock.pipeline(mlp(), batch(8)[:1], ranks=2, loss=F.mse_loss, transport="staged") as pipe:
        assert "here it does what 'auto' does" in "\n".join(pipe.notes)
