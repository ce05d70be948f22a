"""What every verb says of its `--microbatches`, and does if it is left out."""

from penstock.schedule import MICROBATCHES

CUT = "Into how many pieces the batch is cut"

USUAL = f"default {MICROBATCHES}"
"""Where there is no batch to look at."""

USUAL_OF_BATCH = f"{USUAL}, or its rows if they are fewer"
"""Where there is: `Cutting.usual`."""
