"""The NCCL in front of torch's own: from 2.30 on it lets ranks share a GPU, and torch brings an older one.

Needs nothing but Python, since it has to happen before torch is imported.
"""

from __future__ import annotations

import ctypes
import lzma
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "nccl"
"""Where it is looked for, which git ignores: see README.md beside this file."""

NAME = "libnccl.so.2"


_VERSION = """
import ctypes, sys
number = ctypes.c_int()
ctypes.CDLL(sys.argv[1]).ncclGetVersion(ctypes.byref(number))
"""


def put_in_front(folder: Path = FOLDER) -> str:
    """Starts this script again with the library of the folder in front, if there is one and it is not yet.

    Returns why that cannot be, or nothing.
    """
    try:
        library = found_in(folder)
    except (lzma.LZMAError, EOFError, OSError) as error:
        return f"what is in {folder} cannot be unpacked ({error})"
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    if library is None or str(library) in preloaded:
        return ""
    why = _refusal(library)
    if not why:
        sys.stdout.flush()
        environment = {**os.environ, "LD_PRELOAD": ":".join(filter(None, (str(library), *preloaded)))}
        os.execve(sys.executable, [sys.executable, *sys.argv], environment)
    return f"{library} {why}"


def _refusal(library: Path) -> str:
    """Why it cannot be in front, or nothing. It is loaded in a process of its own."""
    if set(": ") & set(str(library)):
        return "has a colon or a space in its path, where LD_PRELOAD would cut it"
    command = [sys.executable, "-c", _VERSION, str(library)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return f"is no NCCL for this machine ({(done.stderr.splitlines() or ['crashed'])[-1]})" if done.returncode else ""


def found_in(folder: Path) -> Path | None:
    """The library in that folder, where it is unpacked once."""
    library, packed = folder.resolve() / NAME, next(iter(sorted(folder.glob("libnccl*.so.2.xz"))), None)
    if packed is not None and not (library.is_file() and library.stat().st_mtime >= packed.stat().st_mtime):
        part = folder / f"{NAME}.{os.getpid()}"
        try:
            with lzma.open(packed) as source, part.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
            part.replace(library)
        finally:
            part.unlink(missing_ok=True)
    return library if library.is_file() else None


def version_in_use() -> tuple[int, ...]:
    """Of the NCCL whose functions torch calls, which `torch.cuda.nccl.version()` does not tell. Empty without one."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(NAME).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100
