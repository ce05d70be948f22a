"""The alpha-beta cost model of collectives: fit measured times, and predict other sizes and networks.

    seconds = rounds * alpha + bytes * bytes_factor * beta

alpha is the fixed cost of a message in seconds; beta is in seconds per byte (R. Hockney, The communication challenge
for MPP, 1994). The model assumes that each rank has one full-duplex port, that the network between the ports is never
the bottleneck, and that adding is free. Its closed forms are in `algorithms`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock._base.errors import ArgumentError
from penstock.network.fabric.algorithms import algorithms, closed_form
from penstock.network.fabric.steps import Terms


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


def combined(links: Iterable[LinkFit], of: Callable[..., float] = max) -> LinkFit | None:
    """Combines the largest alpha and the largest beta of links (`of=min`: the smallest), which limit a collective of
    any size; None without links."""
    found = tuple(links)
    if not found:
        return None
    return LinkFit(of(one.alpha_seconds for one in found), of(one.beta_seconds_per_byte for one in found))


def links_json(record: dict[str, Any], model: Iterable[dict[str, Any]] = ()) -> dict[str, Any] | None:
    """Returns a run's links as `penstock simulate --links` reads them: those measured or, if none were, the slowest of
    the fits in its results' `model`; None if there are neither.

    Pairs that were not measured get the slowest measured values, as "all".
    """
    pairs = dict(record_links(record))
    fits = [LinkFit(one["fit"]["alpha_seconds"], one["fit"]["beta_seconds_per_byte"]) for one in model]
    slowest = combined(pairs.values() or fits)
    if slowest is None:
        return None
    links = [{"from": source, "to": target, **_link(link)} for (source, target), link in pairs.items()]
    return {"units": "latency in seconds, bandwidth in bytes per second", "links": links, "all": _link(slowest)}


def _link(link: LinkFit) -> dict[str, float]:
    rate = {"bandwidth": link.bytes_per_second} if link.beta_seconds_per_byte else {}
    return {"latency": link.alpha_seconds, **rate}
