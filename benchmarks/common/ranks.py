"""Two ranks over gloo, one thread each, in which contestants take turns."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

import torch
import torch.distributed as dist
from torch import Tensor, nn

import penstock
from penstock.distributed.launch.processes import launch
from penstock.distributed.world import join
from penstock.runtime.execute.engine import Engine
from penstock.runtime.transport.protocol import Transport

RANKS = 2
CPU = torch.device("cpu")

Step = Callable[[], object]


def in_two_processes(script: str) -> dict[str, Any]:
    """Runs a script once more, in two processes, with a folder for `measured`. Returns what rank 0 measured there."""
    with tempfile.TemporaryDirectory() as folder:
        status = launch([script, *sys.argv[1:], "--rank-folder", folder], RANKS, threads=1)
        if status:
            sys.exit(status)
        found: dict[str, Any] = json.loads((Path(folder) / "found.json").read_text())
    return found


def measured(measure: Callable[[int], dict[str, Any]], folder: Path) -> None:
    """Runs in each of the two processes. `measure` gets the rank; rank 0 writes what it returns to `folder`."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    found = measure(rank)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def gathered(value: Any) -> list[Any]:
    """Every rank's value, on both."""
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def transport_of(rank: int) -> tuple[Engine, Transport]:
    """A transport of Penstock's between the two ranks, and the engine to close afterwards."""
    engine = Engine(join(None, None, "cpu"), [CPU] * RANKS, seed=0)
    return engine, engine.transports[rank]


class Weights:
    """The parameters that contestants share: those of Penstock's stages on this rank.

    Raises:
        RuntimeError: Penstock has other stages here than `stages`, so that the contestants would differ.
    """

    def __init__(self, pipe: penstock.Pipeline, stages: Iterable[nn.Module]) -> None:
        self._parameters = [parameter for stage in stages for parameter in stage.parameters()]
        if {id(p) for p in pipe.parameters()} != {id(p) for p in self._parameters}:
            raise RuntimeError("Penstock has other stages on this rank than the other contestants would")

    def zero(self) -> None:
        """Drops all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def gradients(self, step: Step) -> list[Tensor | None]:
        """What one step leaves in `.grad`."""
        self.zero()
        step()
        found = [parameter.grad for parameter in self._parameters]
        self.zero()
        return found
