"""What the nodes of a schedule cost, as tables: how long each takes, and how its output travels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.schedule import Op
from penstock.schedule.action import OPS
from penstock.schedule.dependencies import NEEDS, Where
from penstock.simulate.columns import Columns, Floats, Ints
from penstock.simulate.costs import LinkCost, Links, StageCost, cost_between


@dataclass(frozen=True, slots=True)
class Work:
    """Nodes that cost the same share an entry in the tables.

    Attributes:
        of: for each node, its entry: its kind, or one of its own if it overlaps with another.
        seconds: how long it takes; for two that overlap, each one's share of the time that both take.
        latency: of the message that it waits for.
        lag: from when that message leaves until it arrives: `latency`, and the time that it occupies the link.
        paired: whether it overlaps with the next node.
        hold: how long that next node takes.
        wire: how long its own message occupies a link.
        link: which link that is; -1 if no other rank waits for it.
        links: how many links there are.
    """

    of: Ints
    seconds: Floats
    latency: Floats
    lag: Floats
    paired: NDArray[np.bool_]
    hold: Floats
    wire: Floats
    link: Ints
    links: int

    @classmethod
    def of_columns(cls, columns: Columns, costs: Sequence[StageCost], links: Links) -> Work:
        """Raises ArgumentError if a link in use has no cost."""
        kinds = len(Op) * columns.stages
        seconds = np.zeros((len(Op), columns.stages))
        for stage, cost in enumerate(costs):
            seconds[Op.F.code, stage] = cost.forward_seconds
            seconds[Op.B.code, stage] = cost.backward_seconds
            seconds[Op.I.code, stage] = cost.backward_input_seconds
            seconds[Op.W.code, stage] = cost.backward_weight_seconds
        latency, wire_in, pairs = _arrivals(columns, costs, links)
        wire, link = np.zeros(kinds), np.full(kinds, -1)
        used = np.flatnonzero(columns.source >= 0)
        numbers = {pair: number for number, pair in enumerate(np.unique(pairs[used]).tolist())}
        for kind in used.tolist():
            for maker in _makers(OPS[kind // columns.stages]):
                made = maker.code * columns.stages + columns.source[kind]
                wire[made], link[made] = wire_in[kind], numbers[pairs[kind]]
        nothing = np.zeros(kinds)
        plain = cls(
            columns.kinds(), seconds.ravel(), latency, latency + wire_in, nothing.astype(bool), nothing, wire, link,
            len(numbers),
        )  # fmt: skip
        return plain._with_overlaps(columns, costs) if len(columns.joined) else plain

    def _with_overlaps(self, columns: Columns, costs: Sequence[StageCost]) -> Work:
        """An entry for each of two nodes that overlap; those whose kinds are the same as another pair's share it."""
        entries = len(self.seconds)
        pairs = self.of[columns.joined].astype(np.int64) * entries + self.of[columns.joined + 1]
        both, which = np.unique(pairs, return_inverse=True)
        one, two = np.divmod(both, entries)
        fused = np.array([-1.0 if c.overlapped_seconds is None else c.overlapped_seconds for c in costs])
        total = fused[one % columns.stages]
        apart = self.seconds[one] + self.seconds[two]
        share = np.divide(self.seconds[one], apart, out=np.full(len(both), 0.5), where=apart > 0)
        first = np.where(total >= 0, total * share, self.seconds[one])
        # So that their end does not depend on how the share was rounded.
        second = np.where(total >= 0, total - first, self.seconds[two])
        of = self.of.copy()
        of[columns.joined] = entries + which
        of[columns.joined + 1] = entries + len(both) + which
        old = np.concatenate([np.arange(entries), one, two])
        hold = np.concatenate([self.hold, second, np.zeros(len(both))])
        paired = np.concatenate([self.paired, np.ones(len(both), bool), np.zeros(len(both), bool)])
        seconds = np.concatenate([self.seconds, first, second])
        latency, lag, wire, link = (table[old] for table in (self.latency, self.lag, self.wire, self.link))
        return Work(of, seconds, latency, lag, paired, hold, wire, link, self.links)


def _makers(waiter: Op) -> Iterator[Op]:
    """The ops that make what an op waits for on another rank."""
    for need in NEEDS[waiter]:
        if need.where in (Where.BELOW, Where.ABOVE):
            yield from need.ops


def _arrivals(columns: Columns, costs: Sequence[StageCost], links: Links) -> tuple[Floats, Floats, Ints]:
    """For each kind that waits for another rank: its message's latency and time on the wire, and which link it takes
    (sending rank * ranks + receiving rank).
    """
    latency, wire = np.zeros(len(columns.source)), np.zeros(len(columns.source))
    pairs = np.full(len(columns.source), -1)
    used = np.flatnonzero(columns.source >= 0)
    stage, source = used % columns.stages, columns.source[used]
    # The same bytes cross a cut in both directions: the lower stage's output, or its gradient.
    size = np.array([cost.output_bytes for cost in costs], dtype=float)[np.minimum(stage, source)]
    pairs[used] = columns.rank_of[source] * columns.ranks + columns.rank_of[stage]
    for pair in np.unique(pairs[used]).tolist():
        link = cost_between(links, *divmod(pair, columns.ranks))
        on = np.full(len(used), True) if isinstance(links, LinkCost) else pairs[used] == pair
        latency[used[on]] = link.latency_seconds
        wire[used[on]] = size[on] / link.bytes_per_second
        if isinstance(links, LinkCost):
            break
    return latency, wire, pairs
