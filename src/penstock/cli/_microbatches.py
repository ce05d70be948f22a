"""What every verb's help says about `--microbatches`, and the default."""

from penstock.schedule import MICROBATCHES

CUT = "Number of pieces that the batch is cut into"

USUAL = f"default {MICROBATCHES}"
"""For verbs that have no batch."""

USUAL_OF_BATCH = f"{USUAL}, or its number of rows if that is less"
"""For verbs that have one: `Cutting.usual`."""
