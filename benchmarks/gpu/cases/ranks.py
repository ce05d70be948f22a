"""Several processes, the ranks of a pipeline, on the one device of a case."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

from cases.case import Setting, UnsupportedError
from penstock.distributed.launch.agent import end_with_parent


class RanksFailedError(RuntimeError):
    """Some have ended badly; says which, and how. What they wrote is in the case's log."""


def on_ranks(
    setting: Setting,
    ranks: int,
    job: Callable[..., Any],
    *given: Any,
    backend: str = "gloo",
    seconds: float | None = None,
) -> list[Any]:
    """What `job(setting, rank, *given)` returns in each of `ranks` processes, whose default group has that backend.

    They are forks of the process that calls this, which must not have used the device. Raises UnsupportedError if one
    does, and RanksFailedError if some take longer than `seconds` in all.
    """
    until = None if seconds is None else time.monotonic() + seconds
    folder = Path(tempfile.mkdtemp(dir=setting.folder))
    processes = forks(setting, folder, ranks, job, *given, backend=backend)
    for process in processes:
        process.join(None if until is None else max(0.0, until - time.monotonic()))
    late = end(processes)
    absent = [file.read_text() for file in sorted(folder.glob("absent.*"))]
    if absent:
        raise UnsupportedError(absent[0])
    files = [folder / f"raised.{rank}" for rank in range(ranks)]
    raised = [f"rank {rank}: {file.read_text()}" for rank, file in enumerate(files) if file.exists()]
    ended = [f"rank {rank} ended with {each.exitcode}" for rank, each in enumerate(processes) if each.exitcode]
    if late:
        raise RanksFailedError("; ".join([*raised, f"ranks {late} still ran after {seconds:g} s"]))
    if ended:
        raise RanksFailedError("; ".join(raised or ended))
    return [json.loads((folder / f"found.{rank}").read_text()) for rank in range(ranks)]


def forks(
    setting: Setting, folder: Path, ranks: int, job: Callable[..., Any], *given: Any, backend: str = "gloo"
) -> list[ForkProcess]:
    """Processes that run `job(setting, rank, *given)`. Each leaves in `folder` what it returned, or why it did not."""
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=_rank, args=(setting, folder, backend, ranks, rank, job, given)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    return processes


def end(processes: Sequence[ForkProcess]) -> list[int]:
    """Kills those that still run, once they have said where. Returns which."""
    late = [rank for rank, process in enumerate(processes) if process.exitcode is None]
    for rank in late:
        os.kill(processes[rank].pid or 0, signal.SIGUSR1)
    time.sleep(0.5 if late else 0.0)
    for rank in late:
        processes[rank].kill()
        processes[rank].join()
    return late


def _rank(
    setting: Setting, folder: Path, backend: str, ranks: int, rank: int, job: Callable[..., Any], given: Any
) -> None:
    import torch.distributed as dist

    end_with_parent(os.getppid())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        setting.prepare()
        store = dist.FileStore(str(folder / "store"), ranks)
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks)
        (folder / f"found.{rank}").write_text(json.dumps(job(setting, rank, *given)))
        dist.destroy_process_group()
    except UnsupportedError as reason:
        (folder / f"absent.{rank}").write_text(str(reason))
    except Exception as error:
        (folder / f"raised.{rank}").write_text(f"{type(error).__name__}: {error}")
        raise


def torchrun(
    ranks: int, script: Path, arguments: Sequence[str], log: Path, environment: Mapping[str, str]
) -> subprocess.Popen[bytes]:
    """Starts it in a session of its own, which ends when this process does."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"),
        *("--nproc-per-node", str(ranks), str(script), *arguments),
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=partial(_in_agent, os.getpid()),  # noqa: PLW1509 (no thread of this process holds a lock)
        )


def _in_agent(parent: int) -> None:
    end_with_parent(parent)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # whoever started this may have blocked some
    for number in (signal.SIGINT, signal.SIGTERM):  # a handler of run.py's never runs while this waits in gloo
        signal.signal(number, signal.SIG_DFL)


class Forks:
    """Ranks that are forks of this process, with torchrun's variables. Has the same methods as the latter's process."""

    def __init__(self, ranks: int, run: Callable[[], None], environment: Mapping[str, str]) -> None:
        context = multiprocessing.get_context("fork")
        self.returncode = 0
        self._port = _held_port()
        port = str(self._port.getsockname()[1])
        variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
        self._processes = [
            context.Process(target=_as_rank, args=(run, {**variables, **environment, "RANK": str(rank)}, os.getpid()))
            for rank in range(ranks)
        ]
        for process in self._processes:
            process.start()

    def poll(self) -> int | None:
        """None while any of them runs and none has failed."""
        codes = [process.exitcode for process in self._processes]
        self.returncode = next((code for code in codes if code), 0)
        return None if None in codes and not self.returncode else self.returncode

    def kill(self) -> None:
        for process in self._processes:
            process.kill()

    def wait(self) -> None:
        for process in self._processes:
            process.join()
        self._port.close()


def _as_rank(run: Callable[[], None], variables: Mapping[str, str], parent: int) -> None:
    _in_agent(parent)
    os.environ |= {**variables, "LOCAL_RANK": variables["RANK"]}
    run()


def _held_port() -> socket.socket:
    """A free port. Nobody else is given it before this is closed, though a store may listen on it."""
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    return held
