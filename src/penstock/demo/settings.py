"""The demo's options. Does not import torch, so that a wrong option is reported immediately."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock._base.errors import ArgumentError, check_counts
from penstock._base.formatting import pluralize
from penstock.schedule import MICROBATCHES, Schedule, generate, grid

LAYERS = 4
PARAMETERS = 1_853_568
"""The model's blocks and its parameters, stated here so that they can be shown before it is built."""

ROWS = 32
CONTEXT = 128
"""A batch has this many rows of text, each of this many bytes."""

HELD_OUT_BATCHES = 4


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of `penstock demo`.

    Attributes:
        ranks: the number of processes, at most one per block of the model.
        microbatches: how many pieces each batch is cut into.
        out: the folder for the timeline and the metrics.
    """

    ranks: int = 2
    schedule: str = "1f1b"
    microbatches: int = MICROBATCHES
    steps: int = 60
    out: Path = Path("runs/demo")

    def order(self) -> Schedule:
        """Return the schedule.

        Raises:
            ArgumentError: an option is out of range.
        """
        if not 1 <= self.ranks <= LAYERS:
            raise ArgumentError(
                f"--ranks {self.ranks}: the demo's model has {LAYERS} blocks, at least one for each rank; "
                f"pass 1 to {LAYERS}"
            )
        if not 1 <= self.microbatches <= ROWS:
            raise ArgumentError(
                f"--microbatches {self.microbatches}: a batch of the demo has {ROWS} rows, at least one for each "
                f"microbatch; pass 1 to {ROWS}"
            )
        check_counts(steps=self.steps)
        if self.out.exists() and not self.out.is_dir():
            raise ArgumentError(f"--out {self.out}: this is a file; pass a folder")
        return generate(self.schedule, self.ranks, self.microbatches)

    def introduction(self) -> str:
        """Describe the demo in 80 columns. Raise ArgumentError if an option is out of range."""
        schedule, p = self.order(), self.ranks
        split = "in one process" if p == 1 else f"split over {p} processes"
        return f"""\
penstock demo: a small GPT learns Python, {split}

  model     {LAYERS} transformer blocks, {PARAMETERS / 1e6:.1f} million parameters, dropout 0.1;
            it reads bytes; embedding and output layer share their weights
  text      the source files of Python's standard library, 8 MB
  batch     {ROWS} rows of {CONTEXT} bytes, cut into m = {pluralize(self.microbatches, "microbatch")}
  pipeline  p = {pluralize(p, "rank")} (processes), schedule {self.schedule}; in slots of equal length:

{grid(schedule, width=80)}

  F: forward, B: backward, then the microbatch; a dot is a slot in which the
  rank waits. All the dots together are the bubble."""

    def arguments(self) -> list[str]:
        """Return the command-line arguments for `python -m penstock.demo`."""
        options = {"schedule": self.schedule, "microbatches": self.microbatches, "steps": self.steps, "out": self.out}
        return [f"--{name}={value}" for name, value in options.items()]
