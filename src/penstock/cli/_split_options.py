"""The options that say how a model is split, and how its stages run: the same for `inspect` and `verify`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from penstock.cli._target import (
    BalanceOption,
    Cuts,
    GradientDtype,
    Leaves,
    LinkOption,
    MemoryLimit,
    Opens,
    Recompute,
    bytes_in,
    dtype_named,
    link_of,
    names,
    recomputed,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitOptions:
    """How a model is split, and how its stages run."""

    schedule: Annotated[str, typer.Option(help="The schedule; `penstock schedules` lists them.")] = "1f1b"
    chunks: Annotated[int | None, typer.Option(help="Stages per rank; default: the schedule's usual number.")] = None
    cuts: Cuts = None
    leaves: Leaves = None
    opens: Opens = None
    balance: BalanceOption = "time"
    memory_limit: MemoryLimit = None
    link: LinkOption = None
    recompute: Recompute = "never"
    gradient_dtype: GradientDtype = None

    def arguments(self) -> dict[str, Any]:
        """The same as arguments of `penstock.pipeline`. Raises ArgumentError if a text is wrong."""
        return {
            "schedule": self.schedule,
            "chunks": self.chunks,
            "cuts": names(self.cuts),
            "leaves": names(self.leaves),
            "opens": names(self.opens),
            "balance": self.balance,
            "memory_limit": bytes_in(self.memory_limit),
            "link": link_of(self.link),
            "recompute": recomputed(self.recompute),
            "gradient_dtype": dtype_named(self.gradient_dtype),
        }
