"""What NCCL and NVIDIA's compute-sanitizer say."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import torch

from cases.case import Case, Found, NotHereError, Setting
from cases.proofs import prove
from cases.ranks import on_ranks

PART = 4

SHARES_A_GPU = (2, 30)
"""From this version on NCCL allows several ranks on one GPU, if it is asked to."""

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
    yield Case("nccl/two ranks on one GPU", PART, two_ranks)
    yield Case("compute-sanitizer/memcheck", PART, sanitizer, seconds=400.0)


def two_ranks(setting: Setting) -> Found:
    """A proof over NCCL itself, where that lets ranks share a GPU."""
    setting.need_cuda("NCCL")
    version = torch.cuda.nccl.version()
    if version < SHARES_A_GPU:
        said = ".".join(map(str, version))
        raise NotHereError(f"NCCL {said} refuses two ranks on one GPU; 2.30 and later allow it")
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return on_ranks(setting, 2, _over_nccl, backend="cpu:gloo,cuda:nccl")[0]


def _over_nccl(setting: Setting, rank: int) -> Found:
    return prove(setting, "gpt", "float32", "1f1b", transport="distributed")


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
