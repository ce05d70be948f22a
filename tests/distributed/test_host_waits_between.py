"""Between processes, too, the host waits for no device in a steady step: the loss travels once it is there."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from device_group_jobs import device_groups, own_device
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from runtime.step.waiting_jobs import ROWS, STEADY, WIDTH, Masked, tokens_that_count
from scaffolding import stand_in, stand_in_streams
from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after
from scaffolding.stand_in import DEVICE
from scaffolding.stand_in_streams import APART

pytestmark = pytest.mark.distributed


MORE = 6
"""More steps than there may be losses under way."""


class Steps(NamedTuple):
    waits: dict[str, int]
    """In one steady step."""
    losses: list[float]
    moved: list[str]
    """The calls by which tensors travelled."""


def trained(device: str, given: dict[str, Any], also: str, moved: Iterable[str] = ()) -> Steps:
    """Trains the model of `waiting_jobs`.

    Args:
        also: what a user does in each step: "clip" the gradients, or "read" the loss on the first rank alone. "hang":
            the device does nothing of the steady step until the host has given it all of that.
    """
    given = {"microbatches": 4, "loss": F.cross_entropy, "seed": 0, "reduction": tokens_that_count, **given}
    autocast = torch.autocast(device, torch.bfloat16) if given.pop("autocast", False) else nullcontext()
    model = Masked(nn.LayerNorm)
    x, mask, y = torch.randn(ROWS, WIDTH), torch.ones(ROWS, dtype=torch.int64), torch.arange(ROWS) % WIDTH
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    results = []
    with penstock.pipeline(model, (x, mask), devices=device, **given) as pipe:
        for step in range(STEADY + MORE):
            if step == STEADY:
                stand_in.waits.clear()
                if also == "hang":
                    stand_in_streams.hang()
            optimizer.zero_grad()
            with autocast:
                results.append(pipe.step(x, mask, target=y))
            if also == "clip":
                pipe.clip_grad_norm_(1.0)
            if also == "read" and pipe.is_main_process:
                float(results[-1].loss)
            optimizer.step()
            if step == STEADY:
                waits = dict(stand_in.waits)
                if also == "hang":
                    assert repr(results[-1]).startswith("StepResult(loss=under way"), results[-1]
                    stand_in_streams.go_on()
        control = pipe.session.control
        assert all(loss.sources == control.mesh_peers for loss in control._losses), "a sum waits for all of them"
        return Steps(waits, [float(result.loss) for result in results], sorted({*moved}))


def waits(rank: int, shape: tuple[int, int], given: dict[str, Any], also: str, device: str = DEVICE) -> Steps:
    """Trains over (dp, pp) ranks a model that was built on the CPU."""
    own_device(rank)
    mesh = DeviceMesh("cpu", torch.arange(shape[0] * shape[1]).view(shape), mesh_dim_names=("dp", "pp"))
    with device_groups() as moved:
        return trained(device, {**given, "mesh": mesh}, also, moved)


SHORT = [("zb-h1", "")]
LONG = [("dualpipe", "read"), ("zb-v", "hang"), ("interleaved-1f1b", "hang")]
"""zb-v has the loss on the first rank, and dualpipe on both."""


def _of_the_host(steps: list[Steps]) -> list[dict[str, int]]:
    return [{what: count for what, count in one.waits.items() if not what.endswith(APART)} for one in steps]


@pytest.mark.parametrize(("schedule", "also"), long_after(len(SHORT), *SHORT, *LONG))
def test_a_steady_step_waits_for_nothing(own_pair: Ranks, schedule: str, also: str) -> None:
    """Nor does it if the device hangs, or if one rank alone reads the loss. The losses are those of one device."""
    given = {"schedule": schedule}
    steps = own_pair.run(waits, (1, 2), given, also)
    assert _of_the_host(steps) == [{}] * 2
    assert {"irecv", "isend"} <= {*steps[0].moved}
    expected: Any = trained("cpu", {**given, "ranks": 2}, "").losses
    if schedule == "dualpipe":  # two ranks' gradients are added in another order
        expected = pytest.approx(expected, rel=1e-6)
    assert steps[0].losses == expected
    assert steps[1].losses == steps[0].losses


def test_clipping_takes_one_wait(own_pair: Ranks) -> None:
    assert _of_the_host(own_pair.run(waits, (1, 2), {}, "clip")) == [{"to host": 1}] * 2


@pytest.mark.long
@pytest.mark.parametrize(
    "given", [{"schedule": "zb-h1", "autocast": True}, {"recompute": 1}, {"offload": True}], ids=str
)
def test_nor_do_these(own_pair: Ranks, given: dict[str, Any]) -> None:
    assert _of_the_host(own_pair.run(waits, (1, 2), given, "hang")) == [{}] * 2


@pytest.mark.parametrize(
    ("pool", "shape"), long_after(1, ("own_pair", (2, 1)), ("own_four", (2, 2)), ("own_four", (1, 4)))
)
def test_other_meshes(request: pytest.FixtureRequest, pool: str, shape: tuple[int, int]) -> None:
    """Replicas start equal over their devices."""
    steps = request.getfixturevalue(pool).run(waits, shape, {}, "hang")
    assert _of_the_host(steps) == [{}] * len(steps)
    assert len({tuple(one.losses) for one in steps}) == 1
    assert ("broadcast" in steps[0].moved) == (shape[0] > 1)


@pytest.mark.long  # by the stand-in, without which the others would show nothing
def test_a_tensor_on_the_cpu_is_refused(own_pair: Ranks) -> None:
    with pytest.raises(RanksError, match="no backend for a tensor on cpu in a group for standin"):
        own_pair.run(waits, (2, 1), {}, "", "cpu")
