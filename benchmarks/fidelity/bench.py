"""How far predictions are from published measurements, a track a table: one command prints all rows.

Replay: the costs are given, only the schedule's time is predicted, and nothing is fitted. Error: predicted / measured
- 1. Sets that are a model's output are reported apart.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from replay_a_model import vtrain_single
from replay_traces import stragglers, traces, whole_steps
from replay_vocabularies import vocabulary
from result import show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    chosen = parser.parse_args()
    results = [*vocabulary(), *traces(), *whole_steps(), *stragglers(), *vtrain_single()]
    show([one for one in results if one.measured], "Replay: costs given, nothing fitted; against measurements")
    show([one for one in results if not one.measured], "A model's output, not a measurement")
    figures = [
        {"mape": round(one.mean, 4), "median": round(one.median, 4), "worst": round(one.worst, 4)}
        | {key: value for key, value in asdict(one).items() if key != "errors"}
        | {"rows": len(one.errors)}
        for one in results
    ]
    chosen.json.write_text(json.dumps({"replay": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
