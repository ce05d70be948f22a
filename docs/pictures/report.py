"""Draws report.png: the report of a run that it makes, training.py, in two processes. `make pictures` runs it.

It takes a minute, a browser, and a machine with two idle processors.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

HERE = Path(__file__).parent
RANKS, WIDTH, HEIGHT, COLORS = 2, 1280, 800, 256
"""As much of the page as tells what the rest is like, and as many colors as it needs."""


def picture(folder: Path) -> Path:
    """Trains, and draws the run's report. Returns the picture."""
    run, profile, drawn = folder / "text-model", folder / "profile.json", folder / "report.png"
    training = HERE / "training.py"
    launched = ("run", "--ranks", str(RANKS))
    measuring = ("profile", f"{training}:make", "--microbatches", "8", "--out", str(profile))
    _penstock(*launched, "-m", "penstock", *measuring, "--links")  # both processors are busy, as they are in training
    _penstock(*launched, str(training), str(run))
    _penstock("report", str(run), "--profile", str(profile), "--png", str(drawn))
    return drawn


def _penstock(*arguments: str) -> None:
    one_thread = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "penstock", *arguments], check=True, env=one_thread)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made, Image.open(picture(Path(made))) as whole:
        part = whole.convert("RGB").crop((0, 0, min(WIDTH, whole.width), min(HEIGHT, whole.height)))
        part.quantize(COLORS, dither=Image.Dither.NONE).save(HERE / "report.png", optimize=True)
