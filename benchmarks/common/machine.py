"""What a benchmark's figures were measured on."""

from __future__ import annotations

import os
import platform
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
