"""How far predictions are from published measurements, a track a table: one command prints all rows.

Replay: the costs are given, only the schedule's time is predicted, and nothing is fitted. Calibrated: costs follow from
a model's numbers and devices' specifications, with the constants that each line names. Error: predicted / measured - 1.
Sets that are a model's output are reported apart.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from predict_megatron import formulas, table5
from predict_memory import memory
from predict_simumax import simumax
from predict_vtrain import vtrain_multi
from replay_a_model import vtrain_single
from replay_traces import stragglers, traces, whole_steps
from replay_vocabularies import vocabulary
from result import Result, show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    chosen = parser.parse_args()
    replayed = [*vocabulary(), *traces(), *whole_steps(), *stragglers()]
    calibrated = [*table5(), *simumax(), *memory(), *vtrain_multi()]
    outputs = [*vtrain_single(), *formulas()]
    show(replayed, "Replay: costs given, nothing fitted; against measurements")
    show(calibrated, "Calibrated: costs from specifications and the constants named; against measurements")
    show(outputs, "A model's output, not a measurement")
    chosen.json.write_text(
        json.dumps({"replay": figures([*replayed, *outputs]), "calibrated": figures(calibrated)}, indent=2) + "\n"
    )


def figures(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The results for JSON, without every single error."""
    return [
        {"mape": round(one.mean, 4), "median": round(one.median, 4), "worst": round(one.worst, 4)}
        | {key: value for key, value in asdict(one).items() if key != "errors"}
        | {"rows": len(one.errors)}
        for one in results
    ]


if __name__ == "__main__":
    main()
