"""Loading parts of Penstock on first use leaves Python's random numbers alone, though libraries draw on import."""

import subprocess
import sys

FIRST_USES = """
import random
random.seed(0)
before = random.getstate()
import penstock
penstock.pipeline, penstock.profile, penstock.network.fabric, penstock.verify
assert "rich.style" in __import__("sys").modules
assert random.getstate() == before
"""


def test_first_uses_draw_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", FIRST_USES], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
