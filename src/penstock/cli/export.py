"""`penstock export`: writes the weights in a checkpoint to one file for the unsplit model."""

from __future__ import annotations

from pathlib import Path

from penstock._base.errors import CheckpointError
from penstock.cli._options import REQUIRED, argument, option


def export(
    folder: Path = argument(
        "Checkpoint, or a directory of checkpoints, of which the latest is used.", default=REQUIRED
    ),
    out: Path = argument("Safetensors file to write.", default=REQUIRED),
    weights_only: bool = option(
        "Unpickle plain values only. Objects saved in extra= or stateful= need --no-weights-only, which lets the "
        "checkpoint run arbitrary code: use it only for a checkpoint that you trust.",
        "--weights-only/--no-weights-only",
        default=True,
    ),
) -> None:
    """Write the model in a checkpoint, saved by any number of ranks, to one safetensors file. Needs no model code."""
    from penstock.checkpoint import export_checkpoint

    try:
        path = export_checkpoint(folder, out, weights_only=weights_only)
    except OSError as error:
        raise CheckpointError(f"cannot export {folder} to {out}: {error.strerror or error}") from None
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB")
