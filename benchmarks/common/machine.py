"""What a benchmark's figures were measured on."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import penstock


def environment(**more: Any) -> dict[str, Any]:
    """The machine, and whatever else a benchmark says of itself."""
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": models[0].partition(":")[2].strip() if models else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "penstock": penstock.__version__,
        **more,
    }


@contextmanager
def noting_others(environment: dict[str, Any]) -> Iterator[None]:
    """Adds to the environment which share of the machine other processes took meanwhile."""
    began, others = time.perf_counter(), _others_seconds()
    yield
    capacity = (time.perf_counter() - began) * environment["cores"]
    environment["others_share"] = round(max(0.0, _others_seconds() - others) / capacity, 3)


def others_share(environment: dict[str, Any]) -> str:
    """The same in words."""
    return f"other processes took {environment['others_share']:.0%} of the machine meanwhile"


def _others_seconds() -> float:
    """CPU seconds that processes other than this one and its children have used since the machine started."""
    user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    busy = sum(map(int, (user, nice, system, *interrupts))) / os.sysconf("SC_CLK_TCK")
    return busy - sum(os.times()[:4])
