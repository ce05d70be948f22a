"""What the nodes of a schedule cost, as tables: how long each takes, and how its output travels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock._base.errors import ArgumentError
from penstock.schedule import Op
from penstock.simulate.computations import Columns, Floats, Ints
from penstock.simulate.costs import BOUND, SECONDS_OF, LinkCost, Links, StageCost, cost_between


@dataclass(frozen=True, slots=True)
class CostColumns:
    """What a simulation needs of all stages' costs, by stage (S) and number (N), of which there is one where costs do
    not depend on it. A cost for each action of a large schedule fits here, and not into as many `StageCost`s.

    Attributes:
        seconds: how long an op takes, by `Op.code`, [len(Op), S, N].
        output_bytes: of a message to the next stage, [S, N].
        overlapped_seconds: a forward together with the backward of another microbatch, [S, N]; NaN: as long as both.

    Raises:
        ArgumentError: a time is negative or beyond `BOUND`.
    """

    seconds: Floats
    output_bytes: Floats
    overlapped_seconds: Floats

    def __post_init__(self) -> None:
        if not ((self.seconds >= 0) & (self.seconds < BOUND)).all():
            raise ArgumentError(f"an action takes {self.seconds.min()} s; expected 0 or more, below {BOUND:g}")

    @classmethod
    def of(cls, costs: Sequence[Sequence[StageCost]]) -> CostColumns:
        """Of each stage's one cost, or one for each number."""
        seconds = np.zeros((len(Op), len(costs), max(map(len, costs))))
        for op, name in SECONDS_OF.items():
            seconds[op.code] = _by_number(costs, name)
        return cls(seconds, _by_number(costs, "output_bytes"), _by_number(costs, "overlapped_seconds"))

    @classmethod
    def of_seconds(cls, seconds: Floats) -> CostColumns:
        """Of times alone: messages have no bytes."""
        shape = seconds.shape[1:]
        return cls(seconds, np.zeros(shape), np.full(shape, np.nan))


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes that cost the same share an entry in the tables.

    Attributes:
        of: for each node, its entry: its kind, or one of its own if it overlaps with another.
        seconds: how long it takes; for two that overlap, each one's share of the time that both take.
        lag: from when the message that it waits for leaves until it arrives.
        paired: whether it overlaps with the next node.
        hold: how long that next node takes.
    """

    of: Ints
    seconds: Floats
    lag: Floats
    paired: NDArray[np.bool_]
    hold: Floats

    @classmethod
    def of_columns(cls, columns: Columns, costs: CostColumns, links: Links) -> Work:
        """The entries are the kinds of nodes, or the kinds by number where costs are.

        Raises:
            ArgumentError: a link in use has no cost.
        """
        width = costs.seconds.shape[2]
        lag = _lags(columns, costs.output_bytes, links).ravel()
        of = columns.kinds() if width == 1 else columns.kinds() * np.int64(width) + columns.numbers()
        plain = cls(of, costs.seconds.ravel(), lag, np.zeros(lag.size, bool), np.zeros(lag.size))
        return plain._with_overlaps(columns, costs.overlapped_seconds.ravel()) if len(columns.joined) else plain

    def _with_overlaps(self, columns: Columns, fused: Floats) -> Work:
        """An entry for each of two nodes that overlap; those whose entries are the same as another pair's share it.

        `fused` is how long two take together, by the stage (and number) of the forward; NaN if that is unknown.
        """
        entries = len(self.seconds)
        pairs = self.of[columns.joined].astype(np.int64) * entries + self.of[columns.joined + 1]
        both, which = np.unique(pairs, return_inverse=True)
        one, two = np.divmod(both, entries)
        total = fused[one % len(fused)]
        apart = self.seconds[one] + self.seconds[two]
        share = np.divide(self.seconds[one], apart, out=np.full(len(both), 0.5), where=apart > 0)
        known = ~np.isnan(total)
        first = np.where(known, total * share, self.seconds[one])
        # So that their end does not depend on how the share was rounded.
        second = np.where(known, total - first, self.seconds[two])
        of = self.of.copy()
        of[columns.joined] = entries + which
        of[columns.joined + 1] = entries + len(both) + which
        old = np.concatenate([np.arange(entries), one, two])
        hold = np.concatenate([self.hold, second, np.zeros(len(both))])
        paired = np.concatenate([self.paired, np.ones(len(both), bool), np.zeros(len(both), bool)])
        seconds = np.concatenate([self.seconds, first, second])
        return Work(of, seconds, self.lag[old], paired, hold)


def _by_number(costs: Sequence[Sequence[StageCost]], name: str) -> Floats:
    """One field of all costs, by stage and number; a single number if no stage's costs differ by it. NaN is None."""
    found = np.empty((len(costs), max(map(len, costs))))
    for stage, each in enumerate(costs):
        found[stage] = np.array([getattr(cost, name) for cost in each], dtype=float)
    return found


def _lags(columns: Columns, size: Floats, links: Links) -> Floats:
    """For each kind of node that waits for another rank, and number: how long its message takes. `size` is of each
    stage's output, by number.
    """
    lag = np.zeros((len(columns.source), size.shape[1]))
    used = np.flatnonzero(columns.source >= 0)
    stage, source = used % columns.stages, columns.source[used]
    # The same bytes cross a cut in both directions: the lower stage's output, or its gradient.
    crossing = size[np.minimum(stage, source)]
    if isinstance(links, LinkCost):
        lag[used] = links.latency_seconds + crossing / links.bytes_per_second
        return lag
    pairs = columns.rank_of[source] * columns.ranks + columns.rank_of[stage]
    for pair in np.unique(pairs).tolist():
        link, on = cost_between(links, *divmod(pair, columns.ranks)), pairs == pair
        lag[used[on]] = link.latency_seconds + crossing[on] / link.bytes_per_second
    return lag
