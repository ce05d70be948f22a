"""What the calibrated track of benchmarks/fidelity reports, as arithmetic on its data."""

import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks" / "fidelity"


def test_predicted_rows_stay_within_what_is_reported() -> None:
    """SimuMax's, whose constants come from other rows, and Megatron-LM's with none."""
    code = (
        "import json; from predict_simumax import dense_errors, expert_errors;"
        "from predict_megatron import error, rows_of;"
        "print(json.dumps([dense_errors(), expert_errors(), [error(row) for row in rows_of('table5')]]))"
    )
    out = subprocess.run([sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=True).stdout
    dense, experts, megatron = json.loads(out)
    assert max(map(abs, dense)) < 0.025
    assert max(map(abs, experts)) < 0.015
    assert max(map(abs, megatron)) < 0.10
