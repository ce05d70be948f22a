"""The module that a stage's code calls for a random branch: it runs what is inside, or passes on what came in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, fx, nn

from penstock.partition.recording.recording import RandomSource


class Gate(nn.Module):
    """A branch of a recorded forward.

    Args:
        inside: what runs; returns the tuple of the branch's outputs.
        outputs: how many there are.
        runs_if: the decision for which it runs.
        calls: how often it calls each drawing module, so that later calls draw the same whether it ran or not.

    Attributes:
        has_run: whether it ran when it was last called.
    """

    def __init__(
        self, inside: fx.GraphModule, outputs: int, runs_if: bool, streams: RandomSource, calls: Mapping[str, int]
    ) -> None:
        super().__init__()
        self.inside = inside
        self.outputs, self.runs_if = outputs, runs_if
        self.streams, self.calls = streams, dict(calls)
        self.has_run = True

    def forward(self, decision: Any, *values: Any) -> tuple[Tensor, ...]:
        """Runs the branch or skips it. `values`: what to pass on for each output if skipped, then what it needs."""
        self.has_run = bool(decision) == self.runs_if
        if self.has_run:
            outputs: tuple[Tensor, ...] = self.inside(*values[self.outputs :])
            return outputs
        self.streams.pass_by(self.calls)
        return values[: self.outputs]

    def with_inside(self, inside: fx.GraphModule) -> Gate:
        """The same around other code."""
        return Gate(inside, self.outputs, self.runs_if, self.streams, self.calls)


def gates_of(module: nn.Module) -> list[Gate]:
    """The gates in a stage's code."""
    return [part for part in module.modules() if isinstance(part, Gate)]
