"""Starts the programs of this folder that need nothing but the standard library, each as a process of its own."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from penstock.errors import FabricError


def start_program(file: str, arguments: Sequence[str], does: str, **options: Any) -> subprocess.Popen[bytes]:
    """Starts a file, and waits until it says that it is ready.

    Args:
        does: what the process does, for the error.
        options: of `Popen`.

    Raises:
        FabricError: the process did not start.
    """
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", file, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # so that the terminal's Ctrl-C does not reach it
        **options,
    )
    assert process.stdout is not None
    with process.stdout as answer:
        if answer.readline() != b"ready\n":
            process.kill()
            process.communicate()
            raise FabricError(f"the process that {does} did not start")
    return process
