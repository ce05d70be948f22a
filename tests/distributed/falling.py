"""Forks the ranks of a real pipeline, lets one fall at a chosen action of its second step, or leave before that step,
and reports how each ended.

Usage: falling.py FOLDER CASES. CASES is JSON, a list. A case is {"name", "victim", "op", "how"}, and, if it is not the
default, {"schedule", "transport", "replicas"}. They run at the same time, since they mostly wait. Writes
FOLDER/NAME.RANK.log, and prints a list that has for each case the seconds from the fall until each rank's end, and its
exit status.
"""

import atexit
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import penstock
from penstock.runtime.execute.executor import BoundAction

sys.path.insert(0, str(Path(__file__).parents[1]))
from scaffolding.forked import End, forked

STAGES = 3
LIMIT_SECONDS = 60.0
TOLD_SECONDS = 2.0
"""Several beats: the others have heard where a rank is by then."""


class Tied(nn.Module):
    """Its first and its last stage share a parameter, so that every kind of action occurs."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x @ self.embed.weight.T


def fall(how: str, mark: Path) -> None:
    time.sleep(TOLD_SECONDS)
    mark.write_text(str(time.time()))
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def ranks_of(case: dict[str, Any]) -> int:
    return STAGES * int(case.get("replicas", 1))


def train(rank: int, folder: Path, case: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = f"file://{folder}/{case['name']}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks_of(case))
    ids, target = torch.randint(0, 11, (4, 5)), torch.randint(0, 11, (20,))
    mesh = None
    if "replicas" in case:
        mesh = DeviceMesh("cpu", torch.arange(ranks_of(case)).view(-1, STAGES), mesh_dim_names=("dp", "pp"))
    pipe = penstock.pipeline(
        Tied(),
        (ids,),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        cuts=["blocks.1", "blocks.2"],
        microbatches=4,
        schedule=case.get("schedule", "1f1b"),
        transport=case.get("transport", "auto"),
        mesh=mesh,
    )
    target = target.view(4, 5)
    pipe.step(ids, target=target)
    if rank == case["victim"] and case["how"] == "leave":
        (folder / f"{case['name']}.fell").write_text(str(time.time()))
        return
    if rank == case["victim"]:
        plant(pipe, case, folder)
    for _ in range(3):
        pipe.step(ids, target=target)
    print("the run went on to its end")


def plant(pipe: penstock.Pipeline, case: dict[str, Any], folder: Path) -> None:
    """Makes the second action of the kind `op` the victim's last."""
    (bound,) = pipe.session.bound_schedules
    found = [index for index, each in enumerate(bound.actions) if each.action.op.value == case["op"]]
    index = found[min(1, len(found) - 1)]

    def end(*ready: Any) -> None:
        fall(case["how"], folder / f"{case['name']}.fell")

    actions: list[BoundAction] = list(bound.actions)
    actions[index] = replace(actions[index], work=end)
    pipe.session.bound_schedules._bound[bound.number] = replace(bound, actions=tuple(actions))


def work(folder: Path, case: dict[str, Any], rank: int) -> None:
    """Runs a rank, and skips its teardown: taking a forked interpreter apart copies all of its memory."""
    ended: list[bool] = []
    atexit.register(lambda: os._exit(0 if ended else 1))  # the first registered, so the last to run
    train(rank, folder, case)
    ended.append(True)


def told(folder: Path, case: dict[str, Any], end: dict[int, End]) -> dict[str, Any]:
    fell = float((folder / f"{case['name']}.fell").read_text())
    return {
        "seconds": {rank: at - fell for rank, (at, _) in end.items()},
        "status": {rank: status for rank, (_, status) in end.items()},
    }


def main() -> None:
    folder = Path(sys.argv[1])
    cases = {case["name"]: case for case in json.loads(sys.argv[2])}
    ends = forked(
        folder,
        {name: ranks_of(case) for name, case in cases.items()},
        lambda name, rank: work(folder, cases[name], rank),
        LIMIT_SECONDS,
        over=lambda name, left: left <= {cases[name]["victim"]},  # a stopped victim
    )
    print(json.dumps([told(folder, case, ends[name]) for name, case in cases.items()]))


if __name__ == "__main__":
    main()
