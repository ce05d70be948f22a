"""What NVIDIA's compute-sanitizer says."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator

from cases.case import Case, Found, NotHereError, Setting

PART = 4

TINY = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
from cases.case import Setting
from cases.proofs import prove
setting = Setting("cuda", Path("."))
setting.prepare()
found = prove(setting, "mlp", "float32", "zb-h1", ranks=2, whole_batch=False)
print(found["says"])
sys.exit(0 if found["ok"] else 3)
"""


def cases() -> Iterator[Case]:
    yield Case("compute-sanitizer/memcheck", PART, sanitizer, seconds=400.0)


def sanitizer(setting: Setting) -> Found:
    """A small proof under memcheck: accesses out of bounds, and errors of calls that nobody looks at."""
    setting.need_cuda("compute-sanitizer")
    tool = shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path="/usr/local/cuda/bin")
    if tool is None:
        raise NotHereError("compute-sanitizer is not installed")
    command = [
        tool,
        "--tool",
        "memcheck",
        "--error-exitcode",
        "9",
        sys.executable,
        "-c",
        TINY.format(path=sys.path[:2]),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "ERROR SUMMARY" in line]
    print(done.stdout[-3000:], done.stderr[-3000:])
    return {"ok": done.returncode == 0, "says": f"exit status {done.returncode}; {' '.join(lines[-1:])}"}
