"""Several processes, the ranks of a pipeline, on the one device of a case."""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cases.case import NotHereError, Setting
from penstock.launch.agent import end_with_parent


class RanksFailedError(RuntimeError):
    """Some have ended badly; says which, and how. What they wrote is in the case's log."""


def on_ranks(setting: Setting, ranks: int, job: Callable[..., Any], *given: Any, backend: str = "gloo") -> list[Any]:
    """What `job(setting, rank, *given)` returns in each of `ranks` processes, whose default group has that backend.

    They are forks of the process that calls this, which must not have used the device. Raises NotHereError if one does.
    """
    context = multiprocessing.get_context("fork")
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    processes = [
        context.Process(target=_rank, args=(setting, folder, backend, ranks, rank, job, given)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    absent = [file.read_text() for file in sorted(folder.glob("absent.*"))]
    if absent:
        raise NotHereError(absent[0])
    files = [folder / f"raised.{rank}" for rank in range(ranks)]
    raised = [f"rank {rank}: {file.read_text()}" for rank, file in enumerate(files) if file.exists()]
    ended = [f"rank {rank} ended with {each.exitcode}" for rank, each in enumerate(processes) if each.exitcode]
    if ended:
        raise RanksFailedError("; ".join(raised or ended))
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


def _rank(
    setting: Setting, folder: Path, backend: str, ranks: int, rank: int, job: Callable[..., Any], given: Any
) -> None:
    import torch.distributed as dist

    end_with_parent(os.getppid())
    os.environ |= {"LOCAL_RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
    setting.prepare()
    dist.init_process_group(backend, store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    try:
        (folder / f"found.{rank}").write_text(json.dumps(job(setting, rank, *given)))
        dist.destroy_process_group()
    except NotHereError as reason:
        (folder / f"absent.{rank}").write_text(str(reason))
    except Exception as error:
        (folder / f"raised.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise
