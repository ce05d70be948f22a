"""Whether `penstock explain` names what is wrong, and whether repairing it brings what it says.

    penstock run --ranks 4 --threads 1 benchmarks/explain/run.py

Four ranks over gloo train a model whose blocks sleep for as long as they are told to, so that two cores are enough.
Something is planted, explained, and then really repaired; both take turns.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

import penstock
from penstock.plan.explain import explain
from penstock.trace.formats import recording_from_timelines

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from scaffolding.sleeping import SleepingBlock

MICROBATCHES, ROUNDS, SECONDS = 8, 7, 0.005
EVEN = {"seconds": [SECONDS] * 8, "cuts": ["2", "4", "6"]}

CASES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any], str]] = {
    "rank 2's forwards take twice as long": (
        {**EVEN, "slow": {2: 2 * SECONDS}},
        {**EVEN, "seconds": [SECONDS * 13 / 12] * 8},  # the same work, evenly
        "cut=even",
    ),
    "stage 1 has 4 of 8 blocks": ({**EVEN, "cuts": ["1", "5", "7"]}, EVEN, "cut=even"),
    "gpipe, and then 1f1b": ({**EVEN, "schedule": "gpipe"}, {**EVEN, "schedule": "1f1b"}, "schedule=1f1b"),
    "naive, and then gpipe": ({**EVEN, "schedule": "naive"}, {**EVEN, "schedule": "gpipe"}, "schedule=gpipe"),
    "no fault": (EVEN, EVEN, "stragglers=none"),
}
"""What is planted, its repair, and the what-if that says what the repair brings."""


def pipeline(given: Mapping[str, Any], rank: int) -> penstock.Pipeline:
    extra = given.get("slow", {}).get(rank, 0.0) / 2
    model = nn.Sequential(*(SleepingBlock(seconds, extra) for seconds in given["seconds"]))
    return penstock.pipeline(
        model,
        (torch.zeros(MICROBATCHES, 4),),
        loss_fn=nn.functional.mse_loss,
        microbatches=MICROBATCHES,
        schedule=given.get("schedule", "1f1b"),
        cuts=list(given["cuts"]),
        leaf_modules=[str(place) for place in range(len(model))],
    )


def main() -> None:
    import os

    rank, x = int(os.environ["RANK"]), torch.randn(MICROBATCHES, 4)
    found = {}
    for name, (planted, repaired, change) in CASES.items():
        with ExitStack() as stack:
            pipes = [stack.enter_context(pipeline(given, rank)) for given in (planted, repaired)]
            steps: list[list[penstock.Timeline]] = [[], []]
            for number in range(1 + ROUNDS):
                for taken, pipe in zip(steps, pipes, strict=True):
                    timeline = pipe.step(x, target=x, timeline=True).timeline
                    if number and timeline is not None:
                        taken.append(timeline)
            found[name] = told(steps[0], steps[1], change)
            if rank == 0:
                print(name, found[name], flush=True)
    if rank == 0:
        Path(__file__).with_name("results.json").write_text(json.dumps(found, indent=1) + "\n")


def told(planted: list[penstock.Timeline], repaired: list[penstock.Timeline], change: str) -> dict[str, Any]:
    """What was said first, and the repaired step as predicted and as measured."""
    said = explain(recording_from_timelines(planted), what_ifs=[change])
    (predicted,) = said.what_ifs
    before, after = (statistics.median(one.makespan_seconds for one in given) for given in (planted, repaired))
    return {
        "first": said.changes[0].text if said.changes else "",
        "what_if": change,
        "planted_ms": round(1000 * before, 2),
        "repaired_ms": round(1000 * after, 2),
        "predicted_ms": round(1000 * predicted.step_seconds, 2),
        "error": round(predicted.step_seconds / after - 1, 4),
        "own_error": round(said.error, 4),
    }


if __name__ == "__main__":
    main()
