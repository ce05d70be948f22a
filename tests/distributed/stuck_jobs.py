"""A rank whose disk hangs, as ranks of a pool run it, and what the others say of it before it goes on."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import saving_jobs

from penstock import Pipeline, checkpoint
from penstock.distributed.failure import wait_chain

SECONDS = 30.0
"""After which a test has failed."""


def blamed(rank: int, how: str, stuck: int, folder: Path) -> str:
    """What the rank's watchdog would say, while rank `stuck` hangs in the middle of writing."""
    said: list[str] = []

    def hang() -> None:
        end = time.monotonic() + SECONDS
        while len(list(folder.glob("seen-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.05)

    def look(pipe: Pipeline) -> None:
        watchdog, end = pipe.session.control.watchdog, time.monotonic() + SECONDS
        while time.monotonic() < end:
            time.sleep(0.05)
            seen = list(watchdog.sightings)
            if all(one.position.action and one.seconds > 0.3 for one in seen):
                chain = "{}: {}".format(*wait_chain(rank, seen))
                if "its part of a checkpoint" in chain:  # until then all of them may wait for each other's word
                    said.append(chain)
                    break
        (folder / f"seen-{rank}").touch()

    with saving_jobs.training() as (task, pipe, optimizer), pytest.MonkeyPatch.context() as patch:
        saving_jobs.step(task, pipe, optimizer)
        looks = threading.Thread(target=look, args=(pipe,))
        if rank != stuck:
            looks.start()
        if how == "export":
            sync = os.fsync
            if rank == stuck:
                patch.setattr(os, "fsync", lambda file: (hang(), sync(file)))
            checkpoint.export_safetensors(folder / "model.safetensors", pipe)
        else:
            with saving_jobs.writing(hang if rank == stuck else lambda: None):
                checkpoint.save(folder, pipe, optimizer, wait=how == "save")
                checkpoint.finish(pipe)
        if rank != stuck:
            looks.join()
    return said[0] if said else ""
