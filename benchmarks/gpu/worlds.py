"""Runs the cases of a world: its ranks are started once, and each of them runs all cases, one after another.

A case that hangs or falls takes its world with it; the rest go on in a new one. A rank leaves, in a folder, `began.N.R`
with its process's id when it begins case N, and `found.N.R` with what it found.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import rank_main
from cases.case import Case, DeviceType, Setting
from cases.ranks import Forks, torchrun
from rows import BAD, LOG_CHARACTERS, LOGGED, TIME_WAS_UP, Row, row

from penstock.distributed.launch.agent import TAG, kill_remaining
from penstock.distributed.launch.endings import describe_exit

SCRIPT = Path(__file__).with_name("rank_main.py")

START_SECONDS = 60.0
"""For torchrun and its ranks to start, until the first case begins."""

GRACE_SECONDS = 6.0
"""For the other ranks once one has raised: what they say shows whom they name."""

MAX_LOST = 3
"""Worlds of torchrun in a row without a result: after so many the rest do not begin, since each takes long to start."""


class WorldRun:
    """The cases of one world under way."""

    alone = False

    def __init__(
        self, cases: Sequence[Case], device: DeviceType, environment: Mapping[str, str], forks: bool = False
    ) -> None:
        self._waiting = deque(cases)
        self._device = device
        self._environment = environment
        self._patience = Setting(device, Path()).patience
        self._lost = 0
        assert cases[0].world is not None
        self.uses_nccl = cases[0].uses_nccl
        self._is_over_nccl = cases[0].world.is_over_nccl
        self._forks = forks or not self._is_over_nccl
        self._agent: subprocess.Popen[bytes] | Forks | None
        self._start()

    @property
    def is_over(self) -> bool:
        return not self._waiting

    @property
    def _is_given_up(self) -> bool:
        return self._is_over_nccl and self._lost >= MAX_LOST

    def look(self, is_up: bool) -> list[Row]:
        """The rows of cases that have ended since. `is_up`: the time is, and it was asked."""
        found: list[Row] = []
        while self._waiting and not self._is_given_up and (ended := self._ended()) is not None:
            result, is_lost = ended
            found.append(result)
            self._waiting.popleft()
            self._number += 1
            self._started, self._began = time.monotonic(), float("inf")
            if is_lost:
                self._lose()
            else:
                self._lost = 0
        if self._waiting and (is_up or self._is_given_up):
            why = f"{MAX_LOST} worlds in a row were lost before it" if self._is_given_up else TIME_WAS_UP
            if not self._is_given_up:
                seconds = time.monotonic() - (self._started if self._began == float("inf") else self._began)
                says = f"cut off after {seconds:.0f} s: {why}"
                found.append(row(self._waiting.popleft(), "cut off", says, seconds, **self._about("cut off")))
            found += [row(case, "not run", why, 0.0) for case in self._waiting]
            self._waiting.clear()
        if not self._waiting:
            self.end()
        return found

    def end(self) -> None:
        """Ends the agent and all ranks."""
        if self._agent is not None:
            self._agent.kill()
        kill_remaining(self._mark)
        if self._agent is not None:
            self._agent.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        assert self._waiting[0].world is not None
        world = self._waiting[0].world
        self._folder, self._mark = Path(tempfile.mkdtemp(prefix="penstock-gpu-")), secrets.token_hex(8)
        self._number, self._started = 0, time.monotonic()
        self._began = self._raised = float("inf")
        (self._folder / "names").write_text(json.dumps([case.name for case in self._waiting]))
        self._agent = None
        environment = {**self._environment, TAG: self._mark}
        arguments = [self._device, str(self._folder)]
        if self._forks:
            self._agent = Forks(world.ranks, partial(rank_main.main, *arguments), environment)
        else:
            self._agent = torchrun(world.ranks, SCRIPT, arguments, self._folder / "log", environment)

    def _lose(self) -> None:
        self._lost += 1
        self.end()
        if self._waiting and not self._is_given_up:
            self._start()

    def _ended(self) -> tuple[Row, bool] | None:
        """The row of the case under way, and whether its world was lost; None while it runs."""
        case, now = self._waiting[0], time.monotonic()
        assert case.world is not None
        assert self._agent is not None
        ranks = range(case.world.ranks)
        is_gone = self._agent.poll() is not None  # before looking: what it left is there then
        founds = {rank: self._found(rank) for rank in ranks if (self._folder / f"found.{self._number}.{rank}").exists()}
        if self._began == float("inf"):
            if not (self._folder / f"began.{self._number}.0").exists():
                seconds = now - self._started
                if seconds < START_SECONDS * self._patience and not is_gone:
                    return None
                self._forks = True  # if torchrun cannot start any here, the next are
                says = f"its ranks have not begun it after {seconds:.0f} s"
                return row(case, "crashed" if is_gone else "timed out", says, seconds, **self._about("crashed")), True
            self._began = now
        seconds = now - self._began
        if len(founds) == len(ranks):
            merged = _merged(founds)
            is_lost = len(ranks) > 1 and any(found["status"] == "raised" for found in founds.values())
            return row(case, **merged, seconds=seconds, **self._about(merged["status"])), is_lost
        if any(found["status"] == "raised" for found in founds.values()):
            self._raised = min(self._raised, now)
            if now < self._raised + GRACE_SECONDS and not is_gone:
                return None
            return row(case, **_merged(founds), seconds=seconds, **self._about("raised")), True
        if is_gone:
            says = f"{'a rank' if self._forks else 'torchrun'} {describe_exit(self._agent.returncode)}"
            return row(case, "crashed", says, seconds, **self._about("crashed")), True
        if seconds < case.seconds * self._patience:
            return None
        self.ask()
        time.sleep(1.0)
        says = f"ranks {sorted(set(ranks) - founds.keys())} still ran after {seconds:.0f} s"
        return row(case, "timed out", says, seconds, **self._about("timed out")), True

    def _found(self, rank: int) -> Row:
        found: Row = json.loads((self._folder / f"found.{self._number}.{rank}").read_text())
        return found

    def ask(self) -> None:
        """Has each rank write where its threads are."""
        for file in self._folder.glob(f"began.{self._number}.*"):
            with contextlib.suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), signal.SIGUSR1)

    def _about(self, status: str) -> dict[str, Any]:
        """What the ranks and torchrun have written last, for a row that is not as it should be."""
        if status not in LOGGED:
            return {}
        logs = {file.name: file.read_text(errors="replace").strip() for file in sorted(self._folder.glob("log*"))}
        return {"log": {name: text[-LOG_CHARACTERS:] for name, text in logs.items()}}


def _merged(founds: Mapping[int, Row]) -> dict[str, Any]:
    """`status`, `says` and `found` of the first rank that is bad, or of rank 0. `each`: what ranks have apart."""
    ranks = sorted(founds)
    bad = [rank for rank in ranks if founds[rank]["status"] in BAD]
    chosen = founds[(bad or ranks)[0]]
    says = "; ".join(f"rank {rank}: {founds[rank]['says']}" for rank in bad) if bad else chosen["says"]
    each = [founds[rank]["found"].get("each") for rank in ranks]
    return {"status": chosen["status"], "says": says, "found": {**chosen["found"], "each": each}}
