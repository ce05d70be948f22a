"""Processes that make hosts and end in any way, so that a test sees what they leave."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.network import reaper

MAKER = """
import os, signal, subprocess, sys, time
from penstock.network import cpu_limit
from penstock.network.machines import Machines
from penstock.network.parse import parse_link
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background has it ignored
words = sys.argv[1:]
if "slow" in words:
    cpu_limit.VERSIONS = (int(words[-1]),)
link = parse_link("100mbit delay 5ms") if "switch" in words else None
with Machines(2, link, slow={1: 0.05} if "slow" in words else None) as made:
    line = made.command(1, [sys.executable, "-I", "-S", "-c", "import time\\nwhile True: time.sleep(0.001)"])
    worker = subprocess.Popen(line, start_new_session=True)
    while os.readlink(f"/proc/{worker.pid}/ns/net") == os.readlink("/proc/self/ns/net"):
        time.sleep(0.01)
    if "fork" in words and os.fork() == 0:
        end = time.monotonic() + 60  # holds all that its parent had open, until the hosts are gone
        while os.path.exists(f"/var/run/netns/{made.id}-switch") and time.monotonic() < end:
            time.sleep(0.02)
        os._exit(0)
    print(made.id, worker.pid, made._reaper.pid, flush=True)
    if "raise" in words:
        raise RuntimeError("planned")
    if "end" not in words:
        time.sleep(300)
"""


def wait_until(done: Callable[[], bool], seconds: float = 60.0) -> None:
    """Fails unless it comes true in that time."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(0.02)


def marked(pid: int) -> list[int]:
    """Processes of the emulations that this process has made."""
    mark = f"{reaper.MARK}=penstock-{pid}-".encode()
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.append(int(process.name))
    return found


def is_gone(emulation: str) -> bool:
    """Whether nothing of an emulation is left."""
    return not reaper.list_namespaces(emulation) and not reaper.list_cgroups(emulation)


@contextlib.contextmanager
def maker(*words: str) -> Iterator[tuple[subprocess.Popen[str], str, int, int]]:
    """A process with two hosts and a process on the second: it, its emulation, that process, and its reaper."""
    line = [sys.executable, "-c", MAKER, *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process, process.stdout as answer:
        try:
            emulation, worker, keeps = answer.readline().split()
            yield process, emulation, int(worker), int(keeps)
        finally:
            process.kill()
    wait_until(lambda: is_gone(emulation))
