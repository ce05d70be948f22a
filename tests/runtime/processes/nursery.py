"""Forks the ranks of one scenario after another from a process that has imported torch already, and reports their end.

Reads a scenario a line (JSON) and answers in lines: the ranks' ids once all are in place, then each one's exit status.
A rank that is not in place after 30 s, or left 10 s after that, is killed and shows as -9.
Forked ranks end like a script does, `atexit` included.
"""

import atexit
import contextlib
import ctypes
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock.compat import default_store
from penstock.runtime.processes.failure import OUTSIDE, Position
from penstock.runtime.processes.failure_detector import Patience
from penstock.runtime.processes.watchdog import Watchdog

START_SECONDS = 30.0
END_SECONDS = 10.0
MUCH = torch.zeros(8 << 20)  # more than a socket takes: the send waits until someone receives


def toward(rank: int, other: int) -> int:
    return rank + (1 if other > rank else -1)


def wait(watchdog: Watchdog, action: str, peer: int, *, send: bool = False) -> None:
    """What the runtime does at a wait."""
    watchdog.check()
    watchdog.position = Position(action, (peer,))
    try:
        if send:
            dist.send(MUCH, peer)
        else:
            dist.recv(torch.zeros_like(MUCH), peer)
    except RuntimeError:
        watchdog.cause()
        watchdog.check()
        raise
    watchdog.position = OUTSIDE


def hold(place: str, watchdog: Watchdog, rank: int, ranks: int) -> None:
    """The victim at its place, until the test kills or stops it."""
    neighbor = rank + 1 if rank + 1 < ranks else rank - 1
    if place == "receive":
        wait(watchdog, f"{rank}RECV_F0", neighbor)
    elif place == "send":
        wait(watchdog, f"{rank}SEND_F0", neighbor, send=True)
    else:
        watchdog.position = Position("2B3") if place == "compute" else OUTSIDE
        signal.pause()


def once_seen(watchdog: Watchdog, rank: int, then: Callable[[], object]) -> None:
    """Calls `then` when this process has seen that `rank` is in a step."""

    def look() -> None:
        while watchdog.sightings[rank].position == OUTSIDE:
            time.sleep(0.01)
        then()

    threading.Thread(target=look, daemon=True).start()


def victim_falls(rank: int, watchdog: Watchdog, scenario: dict[str, Any], placed: Callable[[], object]) -> None:
    """Everyone waits for the neighbor towards the victim, which raises, leaves, or holds still at a place."""
    victim, place, ranks = scenario["victim"], scenario["place"], scenario["ranks"]
    if place in ("raise", "leave", "outside"):
        placed()
    else:
        once_seen(watchdog, victim, placed)
    if rank != victim:
        wait(
            watchdog,
            f"{rank}SEND_F1" if place == "send" else f"{rank}RECV_B0",
            toward(rank, victim),
            send=place == "send",
        )
    elif place == "raise":
        try:
            raise ValueError("the loss is\nnot a number")
        except ValueError as error:
            watchdog.report("2B3", error)
            raise
    elif place == "leave":
        watchdog.close()
        signal.pause()
    else:
        hold(place, watchdog, rank, ranks)


def late_finish(rank: int, watchdog: Watchdog, scenario: dict[str, Any], placed: Callable[[], object]) -> None:
    """Rank 0 ends first; the last rank keeps the interpreter's lock for long while the one before waits for it."""
    placed()
    last = scenario["ranks"] - 1
    if rank == last:
        watchdog.position = Position("2F0")
        ctypes.PyDLL(None).usleep(int(scenario["seconds"] * 1e6))
        wait(watchdog, "2SEND_B0", last - 1, send=True)
    elif rank == last - 1:
        wait(watchdog, "1RECV_B0", last)
    print(f"rank {rank} is done", flush=True)


def run(rank: int, scenario: dict[str, Any], ready: int) -> None:
    torch.set_num_threads(1)
    ranks = scenario["ranks"]
    store = f"file://{scenario['folder']}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    patience = Patience(stall_seconds=scenario.get("stall_seconds", 5.0))
    watchdog = Watchdog.connect(rank, ranks, default_store(), patience)
    watchdog.step += 1
    story = {"victim_falls": victim_falls, "late_finish": late_finish}[scenario["story"]]
    story(rank, watchdog, scenario, lambda: os.write(ready, b"."))


def redirect(folder: str, rank: int) -> None:
    for stream in (1, 2):
        log = os.open(f"{folder}/{rank}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, stream)


def skip_teardown(ended: list[bool]) -> None:
    """The first registered, so the last to run: taking a forked interpreter apart copies all of its memory."""
    os._exit(0 if ended else 1)


def say(**message: object) -> None:
    print(json.dumps(message), flush=True)


def await_all(pids: list[int]) -> None:
    left, end = set(pids), time.monotonic() + END_SECONDS
    while left:
        for pid in list(left):
            if time.monotonic() > end:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                say(rank=pids.index(pid), status=os.waitstatus_to_exitcode(status))
        time.sleep(0.02)


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        scenario = json.loads(line)
        Path(scenario["folder"]).mkdir(parents=True, exist_ok=True)
        read, ready = os.pipe()
        pids = []
        for rank in range(scenario["ranks"]):
            pid = os.fork()
            if pid == 0:
                redirect(scenario["folder"], rank)
                atexit.register(skip_teardown, ended := [])
                run(rank, scenario, ready)
                ended.append(True)
                return
            pids.append(pid)
        os.close(ready)
        missing, end = scenario["ranks"], time.monotonic() + START_SECONDS
        while missing and select.select([read], [], [], max(0.0, end - time.monotonic()))[0]:
            missing -= len(os.read(read, missing)) or missing
        os.close(read)
        say(pids=pids)
        await_all(pids)


if __name__ == "__main__":
    main()
