"""Rows for some microbatches -> rows for more: what a steady state repeats is repeated more often.

The beginning and the end of a schedule, where it wins or loses, do not depend on how many microbatches come between.
"""

from __future__ import annotations

import math

from penstock.simulate.search.problem import Problem, Rows
from penstock.simulate.search.timing import Timing, fits, time_rows

_CUTS = 12  # moments to try


def stretch(few: Problem, rows: Rows, many: Problem) -> tuple[float, Rows] | None:
    """The best objective and the rows for `many`, whose middle repeats that of `rows`; None if no such rows can run.

    Args:
        few: the question that `rows` answer.
        rows: of `few`; they can be run.
        many: the same question for more microbatches.
    """
    timing = time_rows(few, rows)
    assert timing is not None
    more = [larger - less for larger, less in zip(many.count, few.count, strict=True)]
    best: tuple[float, Rows] | None = None
    end = max(ends[-1] for ends in timing.ends)
    for cut in range(1, _CUTS):
        moment = end * cut / _CUTS
        made = [_repeated(few, row, timing, moment, more) for row in rows]
        if not all(fits(many, rank, row) for rank, row in enumerate(made)):
            continue
        found = time_rows(many, made, best[0] if best else math.inf)
        if found is not None and (best is None or found.cost < best[0]):
            best = found.cost, made
    return best


def _repeated(problem: Problem, row: list[int], timing: Timing, moment: float, more: list[int]) -> list[int]:
    """The row with more of each of its lanes, in the order in which they come next at a moment."""
    taken = [0] * problem.lanes
    at = len(row)
    for i, lane in enumerate(row):
        if timing.starts[lane][taken[lane]] >= moment:
            at = i
            break
        taken[lane] += 1
    order = list(dict.fromkeys(row[at:] + row))
    rounds = max((more[lane] for lane in order), default=0)
    between = [lane for k in range(rounds) for lane in order if k < more[lane]]
    return row[:at] + between + row[at:]
