"""A pool of processes that form a gloo group over loopback, for tests that need real ranks.

The processes are forked from one server, which imports what a step needs once per session, since that takes seconds.
They start with the first job, and again after a job that failed, since its ranks may still be waiting for each other.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

from scaffolding import warm

LIBRARIES = ("transformers.models.llama.modeling_llama",)
"""Modules that most `transformers` models share."""

GRACE_SECONDS = 5.0
"""How long the other ranks may continue once one has failed: their errors may say more."""


def server() -> ForkServerContext:
    """Of whose Process each is a fork of the server."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*warm.MODULES, *LIBRARIES])
    return context


class RanksError(RuntimeError):
    """A job failed on some rank. Contains the remote tracebacks."""


class Ranks:
    """`n` processes, each a rank of one gloo group with a single thread."""

    def __init__(self, n: int) -> None:
        self.n = n
        self._processes: list[ForkServerProcess] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, fn: Callable[..., Any], *args: Any, seconds: float = 60.0) -> list[Any]:
        """Calls `fn(rank, *args)` on each rank and returns the results, by rank.

        `fn` is a module-level function, sent by reference; arguments and results are pickled. Torch's seed is 0 at the
        start, and the folder is the caller's. Raises RanksError with the tracebacks if `fn` failed on a rank or took
        more than `seconds`.
        """
        job = pickle.dumps((sys.path, os.getcwd(), pickle.dumps((fn, args))))
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send_bytes(job)
            answers = self._collect(seconds)
        except BaseException:
            self.stop(kill=True)
            raise
        problems = [f"rank {rank}: {text}" for rank, (ok, text) in sorted(answers.items()) if not ok]
        problems += [f"rank {rank}: did not end" for rank in range(self.n) if rank not in answers]
        if problems:
            self.stop(kill=True)
            raise RanksError(f"{fn.__name__} on {self.n} ranks (at most {seconds:.0f} s)\n" + "\n".join(problems))
        return [pickle.loads(answers[rank][1]) for rank in range(self.n)]

    def stop(self, kill: bool = False) -> None:
        """Ends all processes and waits for them."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()  # an idle rank ends when its pipe does
            if kill:
                process.kill()
        for process in self._processes:
            process.join(GRACE_SECONDS)
            process.kill()
            process.join()
            process.close()
        self._processes, self._pipes = [], []
        if self._folder:
            self._folder.cleanup()
            self._folder = None

    def _start(self) -> None:
        context = server()
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        for rank in range(self.n):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, self.n, f"{self._folder.name}/store"))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _collect(self, seconds: float) -> dict[int, tuple[bool, Any]]:
        """The answers by rank: (True, pickled result) or (False, text)."""
        answers: dict[int, tuple[bool, Any]] = {}
        end = time.monotonic() + seconds
        while len(answers) < self.n:
            waiting = [self._pipes[rank] for rank in range(self.n) if rank not in answers]
            ready = connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    answers[rank] = self._pipes[rank].recv()
                except (EOFError, OSError):
                    self._processes[rank].join(GRACE_SECONDS)
                    answers[rank] = (False, f"its process ended with {self._processes[rank].exitcode}")
                if not answers[rank][0]:
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        return answers


def _serve(pipe: Connection, rank: int, ranks: int, store: str) -> None:
    """The main function of a rank: joins the group, then runs jobs until its pipe closes."""
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    gc.freeze()  # a collection would copy the memory of everything imported
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    with contextlib.suppress(EOFError, OSError):
        while True:
            path, folder, work = pickle.loads(pipe.recv_bytes())
            sys.path[:] = path
            os.chdir(folder)
            torch.manual_seed(0)
            try:
                fn, args = pickle.loads(work)
                answer = (True, pickle.dumps(fn(rank, *args)))
            except Exception:
                answer = (False, traceback.format_exc())
            pipe.send(answer)
    os._exit(0)  # a process group's destructor may wait for ranks that were killed
