"""The NCCL in front of torch's own: from 2.30 on it lets ranks share a GPU, and torch brings an older one.

Needs nothing but Python, since it has to happen before torch is imported.
"""

from __future__ import annotations

import ctypes
import lzma
import os
import shutil
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parent / "nccl"
"""Where it is looked for, which git ignores: see README.md beside this file."""

NAME = "libnccl.so.2"


def put_in_front(folder: Path = FOLDER) -> None:
    """Starts this script again with the library of the folder in front, if there is one and it is not yet."""
    library = found_in(folder)
    preloaded = os.environ.get("LD_PRELOAD", "").split(":")
    if library is None or str(library) in preloaded:
        return
    environment = {**os.environ, "LD_PRELOAD": ":".join(filter(None, (str(library), *preloaded)))}
    sys.stdout.flush()
    os.execve(sys.executable, [sys.executable, *sys.argv], environment)


def found_in(folder: Path) -> Path | None:
    """The library in that folder; if it is packed there, where it was unpacked to."""
    if (folder / NAME).is_file():
        return (folder / NAME).resolve()
    packed = next(iter(sorted(folder.glob("libnccl*.so.2.xz"))), None)
    return None if packed is None else _unpacked(packed)


def _unpacked(packed: Path) -> Path:
    """In a temporary folder, where a later run finds it again."""
    about = packed.stat()
    place = Path(tempfile.gettempdir()) / f"penstock-nccl-{os.getuid()}-{about.st_size}-{int(about.st_mtime)}"
    library = place / NAME
    if not library.is_file():
        place.mkdir(mode=0o700, exist_ok=True)
        part = place / f"{NAME}.{os.getpid()}"
        with lzma.open(packed) as source, part.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
        part.replace(library)
    return library


def version_in_use() -> tuple[int, ...]:
    """Of the NCCL whose functions torch calls, which `torch.cuda.nccl.version()` does not tell. Empty without one."""
    number = ctypes.c_int()
    try:
        ctypes.CDLL(NAME).ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):
        return ()
    return number.value // 10000, number.value // 100 % 100, number.value % 100
