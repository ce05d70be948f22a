"""Runs scripts in the tests' own process, which has already imported what they need."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


def lines_here(script: Path, *arguments: str | Path) -> list[str]:
    """The lines that `python SCRIPT ARGUMENTS` prints, run on one thread. Raises what the script raises."""
    said, threads = io.StringIO(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with pytest.MonkeyPatch.context() as patch, redirect_stdout(said):
            patch.setattr(sys, "argv", [str(script), *map(str, arguments)])
            patch.setattr(sys, "path", [str(script.parent), *sys.path])
            runpy.run_path(str(script), run_name="__main__")
    finally:
        torch.set_num_threads(threads)
    return said.getvalue().splitlines()


def lines_of_rank(_rank: int, script: Path, *arguments: str | Path) -> list[str]:
    """The same as a job for the ranks of a pool."""
    return lines_here(script, *arguments)


def lines_of_torchrun(rank: int, script: Path, *arguments: str | Path) -> list[str]:
    """The same, where the rank is told, as torchrun does, which one of how many it is."""
    ranks = dist.get_world_size()
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**told, "TORCHELASTIC_RUN_ID": "pool"}.items():
            patch.setenv(name, str(value))
        return lines_here(script, *arguments)
