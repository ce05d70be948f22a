"""The alpha-beta cost model of collectives: fit measured times, and predict other sizes and networks.

    seconds = rounds * alpha + bytes * bytes_factor * beta

alpha is the fixed cost of a message in seconds; beta is in seconds per byte (R. Hockney, The communication challenge
for MPP, 1994). The model assumes that each rank has one full-duplex port, that the network between the ports is never
the bottleneck, and that adding is free. The closed forms are in `terms`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.errors import ArgumentError
from penstock.network.fabric.algorithms import algorithms
from penstock.network.fabric.algorithms.forms import Terms
from penstock.network.fabric.terms import busbw_factor, closed_form

HOSTS = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True, slots=True)
class LinkFit:
    """A link's parameters, fitted to measured times.

    Attributes:
        alpha_seconds, beta_seconds_per_byte: 0 or more.
        r2: the fraction of the variance that the fit explains, with each point weighted by 1 / seconds squared.
    """

    alpha_seconds: float
    beta_seconds_per_byte: float
    r2: float = 1.0

    @property
    def bytes_per_second(self) -> float:
        """The bandwidth; infinite if beta is 0."""
        return 1 / self.beta_seconds_per_byte if self.beta_seconds_per_byte else math.inf

    def seconds(self, terms: Terms, size_bytes: float) -> float:
        """Returns the time of a collective of this cost and size."""
        return terms.rounds * self.alpha_seconds + size_bytes * terms.bytes_factor * self.beta_seconds_per_byte


def fit(points: Sequence[tuple[float, float, Terms]], least_beta: float = 0.0) -> LinkFit:
    """Fits alpha and beta, both non-negative, by least squares.

    It minimizes relative residuals, so that small sizes count as much as large ones.

    Args:
        points: (bytes, seconds, terms) of each measurement, for example a median. Algorithms and numbers of ranks may
            be mixed.
        least_beta: a lower bound on beta, in seconds per byte, because the wire is no faster.

    Raises:
        ArgumentError: a time is not positive, or the points cannot separate alpha from beta: fewer than two differ.
    """
    from scipy.optimize import nnls  # takes a second to import

    if any(not 0 < seconds < math.inf or size < 0 for size, seconds, _ in points):
        raise ArgumentError("expected times above 0 and sizes of 0 or more: pass measured seconds, and sizes in bytes")
    seconds = np.array([one[1] for one in points])
    raw = np.array([(terms.rounds, size * terms.bytes_factor) for size, _, terms in points], float).reshape(-1, 2)
    columns = raw / seconds[:, None]
    norms = np.linalg.norm(columns, axis=0)
    if len(points) < 2 or not norms.all() or np.linalg.matrix_rank(columns / norms, 1e-9) < 2:
        raise ArgumentError(f"{len(points)} points cannot separate latency from bandwidth: pass two or more sizes")
    wanted = 1 - columns[:, 1] * least_beta
    alpha, beta = nnls(columns / norms, wanted)[0] / norms + (0.0, least_beta)
    fitted = columns @ np.array([alpha, beta])
    weights = seconds**-2.0
    mean = float((weights * seconds).sum() / weights.sum())
    spread = float((weights * (seconds - mean) ** 2).sum())
    left = float(((1 - fitted) ** 2).sum())
    r2 = 1 - left / spread if spread > 0 else float(left == 0)
    return LinkFit(float(alpha), float(beta), r2)


def predict(link: LinkFit, collective: str, algorithm: str, ranks: int, size_bytes: float) -> float:
    """Predicts the seconds that a collective takes. Raises ArgumentError if there is no such algorithm."""
    return link.seconds(closed_form(collective, algorithm, ranks), size_bytes)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted times of one collective of one size among `ranks` ranks.

    Attributes:
        seconds: by algorithm.
        best: the fastest algorithm.
        bus_bytes_per_second: the best algorithm's bus bandwidth, as nccl-tests defines it.
    """

    collective: str
    ranks: int
    bytes: float
    seconds: dict[str, float]
    best: str
    bus_bytes_per_second: float


def predictions(
    link: LinkFit,
    collective: str,
    size_bytes: float,
    ranks: Iterable[int] = HOSTS,
) -> list[Prediction]:
    """Predicts each number of ranks, by default up to 4096, for all algorithms."""
    rows = []
    for n in ranks:
        seconds = {name: predict(link, collective, name, n, size_bytes) for name in algorithms(collective)}
        best = min(seconds, key=lambda name: seconds[name])
        rate = size_bytes * busbw_factor(collective, n) / seconds[best] if seconds[best] else math.inf
        rows.append(Prediction(collective, n, size_bytes, seconds, best, rate))
    return rows


def crossovers(link: LinkFit, collective: str, ranks: int) -> list[tuple[float, str]]:
    """Returns the size from which each algorithm is the fastest: (bytes, algorithm), the first entry from 0 on.

    Among algorithms that cost the same at all sizes, the first in `algorithms` stands for all.
    """
    lines = []
    for name in algorithms(collective):
        terms = closed_form(collective, name, ranks)
        lines.append((terms.rounds * link.alpha_seconds, terms.bytes_factor * link.beta_seconds_per_byte, name))
    fixed, slope, best = min(lines, key=lambda line: line[:2])
    found = [(0.0, best)]
    while steeper := [line for line in lines if line[1] < slope]:  # only a smaller slope overtakes
        size, _, (fixed, slope, best) = min(
            (((line[0] - fixed) / (slope - line[1]), line[1], line) for line in steeper), key=lambda one: one[:2]
        )
        found.append((size, best))
    return found


def record_links(record: dict[str, Any]) -> list[tuple[tuple[int, int], LinkFit]]:
    """Returns the measured links of a run's record, in order; no bandwidth in the record means an infinite one."""
    found = []
    for link in record.get("links") or ():
        rate = link.get("bytes_per_second")
        fitted = LinkFit(float(link["latency_seconds"]), 1 / rate if rate else 0.0)
        found.append(((int(link["from"]), int(link["to"])), fitted))
    return found


def slowest_of(links: Iterable[LinkFit]) -> LinkFit:
    """Combines the largest alpha and the largest beta of one or more links, which limit a collective of any size."""
    links = tuple(links)
    return LinkFit(max(link.alpha_seconds for link in links), max(link.beta_seconds_per_byte for link in links))


def links_json(found: dict[str, Any] | LinkFit) -> dict[str, Any]:
    """Returns the links as `penstock simulate --links` reads them: from a run's record, or one fit for every pair.

    Pairs that were not measured get the slowest measured values, as "all".

    Raises:
        ArgumentError: the record has no measured links.
    """
    units = "latency in seconds, bandwidth in bytes per second"
    if isinstance(found, LinkFit):
        return {"units": units, "links": [], "all": _link(found)}
    pairs = dict(record_links(found))
    if not pairs:
        raise ArgumentError("the run measured no links: run again with --backend gloo, which measures them")
    links = [{"from": source, "to": target, **_link(link)} for (source, target), link in pairs.items()]
    return {"units": units, "links": links, "all": _link(slowest_of(pairs.values()))}


def _link(link: LinkFit) -> dict[str, float]:
    rate = {"bandwidth": link.bytes_per_second} if link.beta_seconds_per_byte else {}
    return {"latency": link.alpha_seconds, **rate}
