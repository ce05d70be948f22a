"""What the calibrated track of benchmarks/fidelity reports, as arithmetic on its data."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[3] / "benchmarks" / "fidelity"


def test_predicted_rows_stay_within_what_is_reported() -> None:
    """SimuMax's, whose constants come from other rows, and Megatron-LM's with none."""
    code = (
        "import json; from predict_simumax import dense_errors, expert_errors;"
        "from predict_megatron import error, rows_of; from predict_memory import memory;"
        "errors = [dense_errors(), expert_errors(), [error(row) for row in rows_of('table5')]];"
        "print(json.dumps([*errors, [one.errors for one in memory()]]))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True).stdout
    dense, experts, megatron, memory = json.loads(out)
    assert max(map(abs, dense)) < 0.025
    assert max(map(abs, experts)) < 0.015
    assert max(map(abs, megatron)) < 0.10
    llama70, llama405, fullest, least = (max(map(abs, errors)) for errors in memory)
    assert max(llama70, llama405, fullest) < 0.005
    assert least < 0.015
