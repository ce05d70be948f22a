"""What ranks run whose tensors are on the stand-in device and travel through the host's memory."""

from __future__ import annotations

from typing import Any, NamedTuple
from unittest import mock

import jobs
import mesh_jobs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock._base.errors import PenstockError
from penstock.distributed.world import World
from penstock.runtime.execute import transport_choice
from penstock.runtime.execute.engine import Engine
from penstock.runtime.transport.shared_memory import Neighbors
from penstock.runtime.transport.staging import StagedTransport
from penstock.testing import check_transport
from scaffolding import stand_in
from scaffolding.models import Case
from scaffolding.small import batch, mlp
from scaffolding.stand_in import DEVICE, StandIn

STAGED: dict[str, Any] = {"devices": DEVICE, "transport": "staged"}

STEADY = 3
"""After so many steps all is known that a pipeline learns while it runs."""


class Begin(nn.Linear):
    """Makes what one tensor after another is made of: a number, nothing, rows that are one, other dtypes."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = super().forward(x)
        spread = x.mean(1, keepdim=True).expand(-1, 9)
        return {"x": x, "mean": x.mean(), "empty": x[:, :0], "spread": spread, "half": x.bfloat16(), "turned": x + 0j}


class Pass(nn.Linear):
    """Passes them on, most of them as they are."""

    def forward(self, values: dict[str, Tensor]) -> dict[str, Tensor]:  # type: ignore[override]
        x = super().forward(values["x"]) + values["spread"] * values["mean"] + values["half"]
        return {**values, "x": x, "half": values["half"] * 2, "turned": values["turned"] * 1j}


class End(nn.Linear):
    """Uses all of them."""

    def forward(self, values: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(values["x"]) + values["mean"] + values["spread"] + values["half"].float()
        return x + values["turned"].abs() + values["empty"].sum()


def odd() -> Case:
    torch.manual_seed(0)
    layers: list[nn.Module] = [Begin(9, 9), Pass(9, 9), Pass(9, 9), End(9, 9)]
    return Case(layers, (torch.randn(8, 9),), {}, torch.randn(8, 9), F.mse_loss)


jobs.TASKS["odd"] = odd


def verify(rank: int, name: str, options: dict[str, Any]) -> tuple[bool, str, list[str]]:
    stand_in.install()
    return jobs.verify(rank, name, {**STAGED, **options})


def verify_replicas(rank: int, name: str, options: dict[str, Any]) -> mesh_jobs.Verified:
    stand_in.install()
    return mesh_jobs.verify(rank, name, (2, 2), {**STAGED, **options})


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


def waits_in_a_steady_step(rank: int, options: dict[str, Any]) -> dict[str, int]:
    """What the host, and the thread that sends, waited for."""
    stand_in.install()
    x, y = batch(8)
    given: dict[str, Any] = {"microbatches": 4, "loss": F.mse_loss, "broadcast_loss": False, **STAGED, **options}
    with penstock.pipeline(mlp(), (x,), **given) as pipe:
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


class Seen(NamedTuple):
    notes: str
    first_line: str
    transport: str
    losses: list[float]


def by_itself(rank: int, choice: Any) -> Seen:
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
        return Seen("\n".join(pipe.notes), repr(pipe).splitlines()[0], type(inside).__name__, losses)


def notes_on_the_host(rank: int) -> str:
    """What is said where nothing is on a device."""
    x, _ = batch(8)
    with penstock.pipeline(mlp(), (x,), microbatches=4, loss=F.mse_loss, transport="staged") as pipe:
        return "\n".join(pipe.notes)


def refused(rank: int, options: list[dict[str, Any]]) -> str:
    """What each rank says of its own options."""
    stand_in.install()
    x, _ = batch(8)
    try:
        penstock.pipeline(mlp(), (x,), microbatches=4, loss=F.mse_loss, devices=DEVICE, **options[rank])
    except PenstockError as error:
        return str(error)
    return ""
