"""Forks the ranks of real pipelines, in each of which one rank falls in some phase, or never gets that far.

Usage: waiting.py FOLDER CASE... A case is PHASE-HOW-VICTIM. Writes FOLDER/CASE.RANK.log, and prints a JSON object: exit
statuses by case, of the ranks that ended by themselves; the others are killed.
"""

import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import penstock
from penstock import checkpoint
from penstock.distributed import groups, joining
from penstock.distributed.failure_detector import Timeouts
from penstock.pipe import build
from penstock.runtime.execute.engine import Engine
from penstock.runtime.execute.stage import BoundStage
from penstock.runtime.gradients.sharding import ShardedStage
from penstock.runtime.gradients.sums import GradientSum
from penstock.runtime.transport.neighbors import Neighbors

sys.path.insert(0, str(Path(__file__).parents[1]))
from falling import Tied

from scaffolding import stand_in
from scaffolding.forked import forked, log_of
from scaffolding.tcp import sockets

RANKS = 3
LIMIT_SECONDS = 90.0
QUICK = {"beat_seconds": 0.1, "stall_seconds": 1.0, "warn_seconds": 0.6}


Act = Callable[[], None]


def join(rank: int, folder: Path, case: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/{case}.store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)


def two_steps(**options: Any) -> None:
    layers, x = nn.Sequential(*(nn.Linear(6, 6) for _ in range(RANKS))), torch.randn(4, 6)
    pipe = penstock.pipeline(layers, (x,), loss=nn.functional.mse_loss, microbatches=2, **options)
    for _ in range(2):
        pipe.step(x, target=x)


def train_on_device(rank: int, folder: Path, case: str, act: Act) -> None:
    """The victim's device hangs in the second forward of the second step."""
    stand_in.install()
    calls = iter(range(9))
    before_forwards(lambda: act() if next(calls) == 3 else None)
    join(rank, folder, case)
    two_steps(devices=stand_in.DEVICE, schedule="gpipe", transport=sockets)


def train_sharded(rank: int, folder: Path, case: str, act: Act) -> None:
    """Three shards of one stage. The victim does not come to the second all-gather."""
    calls = iter(range(99))
    before(ShardedStage, "unshard", lambda: act() if next(calls) == 1 else None)
    join(rank, folder, case)
    mesh = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "pp"))
    two_steps(mesh=mesh, parallelize=lambda stage: fully_shard(stage, mesh=mesh["dp"]))


def fall(how: str, mark: Path) -> None:
    mark.touch()
    if how == "hang":
        stand_in.hang()
        return
    if how == "raise":
        raise ValueError("the disk is\nfull")
    if how == "sleep":
        signal.pause()
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def before(holder: Any, name: str, act: Act) -> None:
    """Calls `act` before a function does its work."""
    plain = getattr(holder, name)

    def first(*args: Any, **kwargs: Any) -> Any:
        act()
        return plain(*args, **kwargs)

    setattr(holder, name, first)


def before_forwards(act: Act) -> None:
    """Calls `act` before each forward of a stage."""
    plain = BoundStage.forward

    def bound(self: BoundStage, microbatch: int) -> Any:
        run = plain(self, microbatch)

        def first(args: Any) -> None:
            act()
            run(args)

        return first

    BoundStage.forward = bound  # type: ignore[method-assign]


PLACES: dict[str, tuple[Any, str]] = {
    "groups": (groups, "new_group"),
    "example": (build, "share_example"),
    "recording": (build, "Partitioner"),
    "ties": (GradientSum, "start_copies"),
    "neighbors": (Neighbors, "__init__"),
    "connecting": (Engine, "_connect"),
    "saving": (checkpoint.saving, "_write"),
}
"""What the victim calls in each phase; the others are called by `train` itself."""


def train(phase: str, rank: int, folder: Path, case: str, act: Act) -> None:
    torch.manual_seed(0)
    nothing = partial(bool)

    def here(name: str) -> None:
        if name == phase:
            act()

    if phase in PLACES:
        before(*PLACES[phase], act)
    if phase == "init":
        port = int((folder / f"{case}.port").read_text())
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    else:
        join(rank, folder, case)
    if phase == "collective":
        meet = partial(dist.barrier, dist.new_group([1, 2]))  # of the user's own: Penstock does not know of it
        before_forwards(meet if rank else nothing)
    here("init")
    here("join")
    ids = torch.randint(0, 11, (4, 5))

    def parallelize(stage: nn.Module) -> None:
        here("parallelize")

    def materialize(name: str, module: nn.Module) -> None:
        here("materialize")
        getattr(module, "reset_parameters", nothing)()

    model = Tied()
    if phase == "materialize":
        model = model.to("meta")
    pipe = penstock.pipeline(
        model,
        (ids,),
        loss=lambda output, target: nn.functional.cross_entropy(output.flatten(0, 1), target.flatten()),
        cuts=["blocks.1", "blocks.2"],
        microbatches=2,
        materialize=materialize if phase == "materialize" else None,
        parallelize=parallelize if phase == "parallelize" else None,
    )
    here("stepping")
    here("collective")
    pipe.step(ids, target=ids)
    pipe.all_gather_object(rank)
    checkpoint.save(folder / f"{case}.saved", pipe)
    checkpoint.load(folder / f"{case}.saved", pipe)
    pipe.predict(ids)
    here("closing")
    pipe.close()
    print("the run went on to its end", flush=True)


def work(folder: Path, case: str, rank: int) -> None:
    torch.set_num_threads(1)
    phase, how, victim = case.split("-")
    build.Timeouts = joining.Timeouts = partial(Timeouts, **QUICK)  # type: ignore[assignment, misc]
    act = partial(fall, how, folder / f"{case}.fell") if rank == int(victim) else partial(bool)
    run = {"device": train_on_device, "sharded": train_sharded}.get(phase, partial(train, phase))
    run(rank, folder, case, act)


def over(folder: Path, expected: dict[str, str], case: str, left: set[int]) -> bool:
    """Whether nothing more is to be seen of a case: each of its ranks that are left has said what it waits for."""
    phase, how, victim = case.split("-")
    others = left - {int(victim)}
    if phase == "closing":
        others &= {0}  # it alone serves the others to their end
    if not others:
        return True
    if how not in ("sleep", "hang") or not (folder / f"{case}.fell").exists():
        return False
    words = expected[case].format(victim=victim)
    return all(re.search(words, log_of(folder, case, rank).read_text()) for rank in others)


def main() -> None:
    folder, cases = Path(sys.argv[1]), sys.argv[2:]
    for case in cases:
        if case.startswith("init"):
            with socket.create_server(("127.0.0.1", 0)) as free:
                (folder / f"{case}.port").write_text(str(free.getsockname()[1]))
    is_over = partial(over, folder, json.loads((folder / "expected.json").read_text()))
    ends = forked(folder, dict.fromkeys(cases, RANKS), partial(work, folder), LIMIT_SECONDS, is_over)
    print(json.dumps({case: {rank: end.status for rank, end in of.items()} for case, of in ends.items()}))


if __name__ == "__main__":
    main()
