"""A vocabulary spread over all ranks: three published ways, each an order of 1F1B and passes on every rank.

Yeung, Qi, Lin, Wan: "Balancing Pipeline Parallelism with Vocabulary Parallelism", 2024. The output layer of each
rank's part of the vocabulary is a pass that begins when the last stage's forward has ended:

    vocab-1       two passes, S and T, with a collective after each; p - r + 2 microbatches in flight on rank r
    vocab-2       one collective, so the two are one pass; p - r + 1 in flight
    interlaced    one pass, in which ranks wait for their collectives; 1.5 (p - r) in flight

The input layer is a pass before the first stage's forward, its gradient one after the first stage's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ArgumentError
from penstock.schedule import Schedule
from penstock.schedule.generators import one_f_one_b
from penstock.simulate.passes import Pass, Side

IN_FLIGHT: Mapping[str, Callable[[int], int]] = {
    "vocab-1": lambda below: below + 2,
    "vocab-2": lambda below: below + 1,
    "interlaced": lambda below: -(-3 * below // 2),
}
"""How many microbatches a rank holds at most, where plain 1F1B holds `below`: p - r."""

Seconds = float | Sequence[float]
"""On every rank, or on each."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """How a vocabulary is spread, and what its parts take for one microbatch.

    Attributes:
        method: one of `IN_FLIGHT`.
        output: of the output layer's part, forward and backward together.
        embedding, embedding_backward: of the input layer's part.
        collective_seconds: how long a collective of all ranks takes.

    Raises:
        ArgumentError: there is no such method.
    """

    method: str
    output: Seconds
    embedding: Seconds = 0.0
    embedding_backward: Seconds = 0.0
    collective_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.method not in IN_FLIGHT:
            raise ArgumentError(f"vocabulary method {self.method!r}: expected one of {', '.join(IN_FLIGHT)}")

    def schedule(self, ranks: int, microbatches: int) -> Schedule:
        """1F1B with as many microbatches in flight as the method needs."""
        in_flight = [IN_FLIGHT[self.method](ranks - rank) for rank in range(ranks)]
        made = one_f_one_b(ranks, microbatches, in_flight)
        return Schedule(f"1f1b, {self.method}", made.placement, microbatches, made.rows)

    def passes(self) -> list[Pass]:
        """What every rank does besides; parts that take no time are left out."""
        wait, output = self.collective_seconds, np.asarray(self.output, float)
        match self.method:
            case "vocab-1":
                layer = [_pass(f"vocabulary {part}", Side.OUTPUT, output / 2, wait) for part in "ST"]
            case "vocab-2":
                layer = [_pass("vocabulary", Side.OUTPUT, output, wait)]
            case _:  # a rank is busy while the output is broadcast, and its gradient summed
                layer = [_pass("vocabulary", Side.OUTPUT, output + 2 * wait)]
        every = [
            _pass("embedding", Side.INPUT, np.asarray(self.embedding, float), wait),
            *layer,
            _pass("embedding backward", Side.GRADIENT, np.asarray(self.embedding_backward, float)),
        ]
        return [one for one in every if np.any(one.seconds)]


def _pass(name: str, side: Side, seconds: np.ndarray, wait: float = 0.0) -> Pass:
    return Pass(name, side, tuple(seconds.tolist()) if seconds.ndim else float(seconds), wait)
