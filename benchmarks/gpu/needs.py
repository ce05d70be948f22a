"""What a machine has to have for these cases, or for some of them. Needs nothing but Python, and an old one will do."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import sys
import tempfile
from typing import NamedTuple

import nccl_library

PYTHON, TORCH, NCCL = (3, 11), (2, 11), (2, 30)
"""The oldest that will do. From that one on NCCL lets several ranks share a GPU, if it is asked to."""

PACKAGES = ("numpy", "rich", "torch")

ALL = "*"


class Lack(NamedTuple):
    """Something that is missing: the pattern of the cases that want it, what to say, and whether they can't run so."""

    cases: str
    says: str
    is_vital: bool = True


def lacks(device: str, refused: str = "") -> list[Lack]:
    """What this machine lacks. `refused`: why the NCCL of one's own could not be put in front."""
    found = [Lack(ALL, f"Python {dotted(PYTHON)} or newer")] if sys.version_info < PYTHON else []
    found += [Lack(ALL, name) for name in PACKAGES if not _imports(name)]
    if found:
        return found
    import torch

    if tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < TORCH:
        return [Lack(ALL, f"torch {dotted(TORCH)} or newer (it has {torch.__version__})")]
    commands = "ranks/penstock verify*"
    for cases, name in (("*llama*", "transformers"), (commands, "typer"), (commands, "pydantic")):
        if importlib.util.find_spec(name) is None:
            found.append(Lack(cases, f"{name} is not installed"))
    variable, *compilers = ("CC", "gcc", "clang", "cc") if device == "cuda" else ("CXX", "g++", "clang++", "c++")
    if not any(map(shutil.which, [os.environ.get(variable, ""), *compilers])):
        found.append(Lack("feature/*/compile*", f"there is no compiler ({compilers[0]})"))
    if device == "standin":
        found.append(Lack("ranks/*", "NCCL has no stand-in there; --device cpu rehearses it"))
    if device == "cuda" and (version := nccl_library.version_in_use()) < NCCL:
        says = f"NCCL {dotted(version) or 'none'} refuses two ranks on one GPU"
        how = refused or f"put {dotted(NCCL)} or newer into {nccl_library.FOLDER}: see README.md"
        found.append(Lack("ranks/*", f"{says}; {how}"))
    for cases, folder, mib in ((ALL, tempfile.gettempdir(), 512), ("ranks/*", "/dev/shm", 64)):
        free = shutil.disk_usage(folder).free >> 20 if os.path.isdir(folder) else 0
        if free < mib and (folder != "/dev/shm" or device == "cuda"):
            found.append(Lack(cases, f"{folder} has {free} MiB free, and should have {mib}", is_vital=False))
    return found


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except ImportError:
        return False
    return True


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
