"""What every verb's help says about `--microbatches`, and the default."""

from penstock.schedule import MICROBATCHES

CUT = "Into how many pieces the batch is cut"

USUAL = f"default {MICROBATCHES}"
"""For verbs that have no batch."""

USUAL_OF_BATCH = f"{USUAL}, or its rows if they are fewer"
"""For verbs that have one: `Cutting.usual`."""
