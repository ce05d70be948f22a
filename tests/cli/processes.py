"""Processes that a command has started: which there are, and whether they have ended."""

from __future__ import annotations

import os
import select


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
