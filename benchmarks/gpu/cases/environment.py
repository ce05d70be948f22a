"""What is installed, and what it runs on."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import nccl_library

from cases.case import Case, Found, Setting

FIRST = "environment"
"""The case that every part begins with, since results belong to what it finds."""


def cases() -> Iterator[Case]:
    yield Case(FIRST, 1, environment, alone=True)


def environment(setting: Setting) -> Found:
    """Versions, and the device."""
    import torch

    import penstock

    setting.prepare()
    found: Found = {
        "device": setting.device,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "penstock": penstock.__version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": _commit(),
        "code": _digest(Path(penstock.__file__).parent, Path(__file__).parents[1]),
        "transformers": _version("transformers"),
        "cores": len(os.sched_getaffinity(0)),
        "host_memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }
    if setting.is_real:
        found |= _cuda()
    return {"ok": True, "says": ", ".join(f"{name} {value}" for name, value in found.items()), **found}


def _cuda() -> Found:
    import torch

    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    asks = shutil.which(query[0]) is not None
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0] if asks else ""
    return {
        "gpu": properties.name,
        "gpus": torch.cuda.device_count(),
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver.strip() or "not known",
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, nccl_library.version_in_use() or torch.cuda.nccl.version())),
    }


def _digest(*folders: Path) -> str:
    """Of the code there: a commit would not tell what has been edited since."""
    found = hashlib.sha256()
    for file in (file for folder in folders for file in sorted(folder.rglob("*.py"))):
        found.update(file.read_bytes())
    return found.hexdigest()[:12]


def _commit() -> str:
    """Ends in "-dirty" if something has been edited since."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    if shutil.which(command[0]) is None:
        return "not known"
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "not known"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
