"""Processes that a command has started: which there are, and whether they have ended."""

from __future__ import annotations

import os
import select
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """The ids of a process's children, their children, and so on."""
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        children += map(int, (task / "children").read_text().split())
    return [found for child in children for found in (child, *descendants(child))]


def has_ended(pid: int, seconds: float = 30) -> bool:
    """Whether a process that is not our child ends in that time."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], seconds)[0])
    finally:
        os.close(handle)
