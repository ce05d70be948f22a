"""Runs functions each in a process of its own, so that what one leaves in globals cannot reach the next."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SECONDS = 60.0
PRELOADED = [
    *("torch", "torch.distributed", "torch._dynamo", "numpy"),
    *("penstock.checkpoint", "penstock.verification.verify"),
]

Call = tuple[Callable[..., Any], tuple[Any, ...]]


def server() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context


def run(calls: list[Call], seconds: float = SECONDS, *, together: bool = True) -> list[Any]:
    """What each call returns, all at once in processes of their own; what one raises is `{"error": ...}`.

    Args:
        seconds: a process that takes longer is ended.
        together: whether they may wait for each other, so that where one raises the others have ten seconds more.
    """
    context, pipes, processes = server(), list[Connection](), list[Any]()
    for function, args in calls:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, function, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    found: list[Any] = [{"error": f"did not end in {seconds:.0f} s"}] * len(calls)
    waiting, end = dict(zip(pipes, range(len(calls)), strict=True)), time.monotonic() + seconds
    while waiting and (left := end - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            at = waiting.pop(pipe)  # type: ignore[arg-type]
            try:
                found[at] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                found[at] = {"error": "the process died"}
            if together and isinstance(found[at], dict) and "error" in found[at]:
                end = min(end, time.monotonic() + 10)
    for process, pipe in zip(processes, pipes, strict=True):
        process.kill()
        process.join()
        pipe.close()
    return found


def _work(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    import torch

    gc.freeze()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.path.insert(0, str(HERE))
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    try:
        found = function(*args)
    except BaseException as error:
        words = " ".join(str(error).split())
        found = {"error": f"{type(error).__name__}: {words}", "ours": type(error).__module__.startswith("penstock")}
    pipe.send(found)
    os._exit(0)
