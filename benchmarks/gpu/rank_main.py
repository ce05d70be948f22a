"""A rank of a world, as a fork or torchrun's: runs all of its cases, one after another. See worlds.py."""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

RAISED = 3
"""The exit status after a case has raised: the other ranks may wait for this one."""


def main(device: str, place: str) -> None:
    from penstock.distributed.launch.agent import end_with_parent

    end_with_parent(os.getppid())  # before torch is imported, which takes seconds
    folder, rank = Path(place), int(os.environ["RANK"])
    log = os.open(folder / f"log.{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    faulthandler.register(signal.SIGUSR1, all_threads=True)

    from cases import TABLE, nccl
    from cases.case import Setting
    from rows import outcome

    names = json.loads((folder / "names").read_text())
    world = TABLE[names[0]].world
    assert world is not None
    setting = Setting(device, folder)  # type: ignore[arg-type]
    setting.prepare()
    join(setting, world.groups, rank, world.ranks)
    for number, name in enumerate(names):
        leave(folder / f"began.{number}.{rank}", str(os.getpid()))
        while not all((folder / f"began.{number}.{other}").exists() for other in range(world.ranks)):
            time.sleep(0.005)  # or a rank could end in this case while others are in the one before
        print(f"-- {name}", flush=True)
        began = time.perf_counter()
        with nccl.rules(setting, eager=world.groups == "device_id") if world.is_over_nccl else nullcontext():
            result = outcome(TABLE[name], setting)
        result["found"]["rank_seconds"] = round(time.perf_counter() - began, 2)
        leave(folder / f"found.{number}.{rank}", json.dumps(result))
        if result["status"] == "raised" and world.ranks > 1:
            sys.stdout.flush()
            os._exit(RAISED)
    os._exit(0)  # its groups end with it: how they end is a case's matter


def join(setting: Any, groups: str, rank: int, ranks: int) -> None:
    import torch
    import torch.distributed as dist

    if setting.is_real:
        torch.cuda.init()  # or a DeviceMesh would choose one by the rank's number
        torch.cuda.set_device(0)
        torch.cuda.set_per_process_memory_fraction(0.9 / ranks)
    if groups == "own" or ranks == 1:
        return
    backend = groups if groups in ("gloo", "nccl") else "cpu:gloo,cuda:nccl"
    backend = backend if setting.is_real else "gloo"
    more: dict[str, Any] = {}
    if setting.is_real and groups == "device_id":
        more["device_id"] = torch.device("cuda", 0)
    if not dist.is_torchelastic_launched():  # rank 0 may end before the others have left init_process_group
        more["store"] = dist.FileStore(str(setting.folder / "store"), ranks)
    dist.init_process_group(backend, rank=rank, world_size=ranks, **more)


def leave(file: Path, text: str) -> None:
    """Writes a file that is whole as soon as it is there."""
    part = file.with_suffix(f"{file.suffix}.part")
    part.write_text(text)
    part.rename(file)


if __name__ == "__main__":
    main(*sys.argv[1:])
