"""What each rank of two machines runs, under torchrun. Its arguments are a folder, the name of another machine, and
how to end: "well" or "not".

It leaves FOLDER/shown.RANK, a JSON object: which ranks are reached through shared memory, and what `penstock.verify`
says of each transport; for the second, MASTER_ADDR names the other machine. Not to end, it proves nothing, leaves
FOLDER/trains.RANK after some steps, and trains until it is ended.
"""

import json
import os
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import penstock
from penstock._base.process import Process
from penstock.runtime.transport.shared_memory import SharedMemoryTransport

sys.path.insert(0, str(Path(__file__).parents[1]))
from scaffolding import models

LOST_AFTER = 11.0
"""Seconds: more than the 8 after which the kernel gives up a connection over the cut cable, which drops its packets."""


def neighbors() -> list[int]:
    """The ranks that this one reaches through shared memory."""
    case = models.gpt()
    with penstock.pipeline(case.model, case.args, loss=case.loss, microbatches=2) as pipe:
        (transport,) = pipe.session.engine.transports.values()
        return sorted(transport._neighbors.ranks) if isinstance(transport, SharedMemoryTransport) else []


def prove(other: str = "") -> dict[str, Any]:
    shown: dict[str, Any] = {"neighbors": neighbors()}
    for transport in ("auto", "distributed"):
        torch.manual_seed(0)
        case = models.gpt(dropout=0.1)
        report = penstock.verify(
            case.model, case.args, target=case.target, loss_fn=case.loss, microbatches=2, transport=transport
        )
        shown[transport] = [report.ranks, report.ok, report.summary()]
        if other:
            os.environ["MASTER_ADDR"] = other  # rank 0 need not be there: the pipeline may be a part of the job
    return shown


def as_on_two_machines(rank: int) -> dict[str, Any]:
    """The same in a pool, of whose ranks each two take themselves for those of one machine."""
    torch.set_num_threads(1)
    machine = f"{Process.here().machine} {rank // 2}"
    with mock.patch.object(Process, "here", lambda here=Process.here: replace(here(), machine=machine)):
        return prove()


def go_on(folder: Path) -> None:
    """Trains for ever. A rank on another machine is lost after `LOST_AFTER`."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    x = torch.randn(8, 8)
    loss = torch.nn.functional.mse_loss
    with penstock.pipeline(model, (x,), loss=loss, microbatches=4, lost_after=LOST_AFTER) as pipe:
        for step in count():
            pipe.step(x, target=x)
            if step == 5:
                (folder / f"trains.{dist.get_rank()}").touch()


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[3] == "not":
        go_on(Path(sys.argv[1]))
    dist.init_process_group("gloo")
    (Path(sys.argv[1]) / f"shown.{dist.get_rank()}").write_text(json.dumps(prove(sys.argv[2])))
    dist.destroy_process_group()
