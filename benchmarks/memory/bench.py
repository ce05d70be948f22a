"""Predicted and measured peaks of each rank's memory: python benchmarks/memory/bench.py [--json FILE]."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from scaffolding import memory_held
from scaffolding.ranks import Ranks

SCHEDULES = (("gpipe", {}), ("1f1b", {}), ("interleaved-1f1b", {"stages_per_rank": 2}), ("zb-h1", {}))
KINDS = ((torch.float32, {}), (torch.bfloat16, {}), (torch.bfloat16, {"grad_dtype": torch.float32}))


def rows(ranks: int) -> list[dict[str, Any]]:
    """One for each rank of each configuration."""
    processes, found = Ranks(ranks), []
    for schedule, more in SCHEDULES:
        for recompute in ("never",) if schedule == "zb-h1" else ("never", "always"):
            for dtype, also in KINDS:
                options = {"schedule": schedule, "recompute": recompute, "balance": "flops", **more, **also}
                ahead = memory_held.predicted(dtype, ranks, options)
                measured = processes.run(memory_held.held, dtype, options)
                for rank, (one, other) in enumerate(zip(ahead, measured, strict=True)):
                    found.append(
                        {
                            "schedule": schedule,
                            "recompute": recompute,
                            "ranks": ranks,
                            "rank": rank,
                            "dtype": str(dtype),
                            "gradients": str(also.get("grad_dtype", dtype)),
                            "predicted_bytes": one,
                            "measured_bytes": other,
                            "error": one / other - 1,
                        }
                    )
    processes.stop()
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    given = parser.parse_args()
    found = [row for ranks in (2, 4) for row in rows(ranks)]
    given.json.write_text(json.dumps({"torch": torch.__version__, "rows": found}, indent=1) + "\n")
    for schedule, _ in SCHEDULES:
        for recompute in dict.fromkeys(row["recompute"] for row in found if row["schedule"] == schedule):
            errors = [r["error"] for r in found if (r["schedule"], r["recompute"]) == (schedule, recompute)]
            print(f"| {schedule} | {recompute} | {min(errors):+.1%} | {max(errors):+.1%} |")


if __name__ == "__main__":
    main()
