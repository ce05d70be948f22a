"""From a run to other sizes and numbers of hosts: the link that its times fit, how well, and what that predicts.

A collective that the run has in three sizes or more is fitted by the medians of its completion times, so that alpha is
what a step of its algorithm costs there, software included. Otherwise the links that were measured stand in.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ArgumentError
from penstock.fabric.models import (
    LinkFit,
    Prediction,
    Terms,
    closed_form,
    crossovers,
    fit,
    known_algorithms,
    predictions,
    record_links,
)
from penstock.fabric.statistics import fewest

FEWEST_SIZES = 3
"""Of a collective, below which a fit has no residuals worth the name."""

ENGINE = "engine"
MOST_HOSTS = 1 << 16


@dataclass(frozen=True, slots=True)
class Point:
    """A size that was measured: the median of its completion times, and what the fit says."""

    bytes: int
    ranks: int
    measured_seconds: float
    fitted_seconds: float

    @property
    def residual(self) -> float:
        """Above 0 where it took longer than the fit says; a share of what was measured."""
        return (self.measured_seconds - self.fitted_seconds) / self.measured_seconds


@dataclass(frozen=True, slots=True)
class Fitted:
    """The link, as one collective of a run sees it.

    Attributes:
        algorithm: of the run; empty if the run has no such collective.
        form: the algorithm whose closed form was fitted: the engine's own collectives are taken for the first of ours.
        source: "times" of the run's transfers, or "links" that were measured before its trials.
    """

    collective: str
    algorithm: str
    form: str
    source: str
    link: LinkFit
    points: tuple[Point, ...]

    @property
    def largest_residual(self) -> float:
        """Without its sign; 0 if no size was measured."""
        return max((abs(point.residual) for point in self.points), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        beta = self.link.beta_seconds_per_byte
        return {
            "collective": self.collective,
            "algorithm": self.algorithm or None,
            "form": self.form,
            "source": self.source,
            "alpha_seconds": self.link.alpha_seconds,
            "beta_seconds_per_byte": beta,
            "bytes_per_second": 1 / beta if beta else None,
            "r2": self.link.r2 if self.source == "times" else None,
            "largest_residual": self.largest_residual if self.points else None,
            "sizes": [
                {
                    "bytes": point.bytes,
                    "ranks": point.ranks,
                    "measured_s": point.measured_seconds,
                    "fitted_s": point.fitted_seconds,
                    "residual": point.residual,
                }
                for point in self.points
            ],
        }


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run predicts of one collective.

    Attributes:
        rows: by size, then by hosts.
        crossovers: by hosts, from which size on which algorithm is the fastest.
    """

    fitted: Fitted
    rows: tuple[Prediction, ...]
    crossovers: dict[int, list[tuple[float, str]]]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "fit": self.fitted.to_dict(),
            "predictions": [
                {
                    "hosts": row.ranks,
                    "bytes": row.bytes,
                    "seconds": row.seconds,
                    "best": row.best,
                    "busbw_GBps": row.bus_bytes_per_second / 1e9 if math.isfinite(row.bus_bytes_per_second) else None,
                }
                for row in self.rows
            ],
            "crossovers": [
                {"hosts": hosts, "from": [{"bytes": size, "algorithm": name} for size, name in found]}
                for hosts, found in self.crossovers.items()
            ],
        }


def forecast(
    record: dict[str, Any], results: dict[str, Any], collective: str, sizes: Sequence[int], hosts: Sequence[int]
) -> Forecast:
    """Predicts a collective from a run's record and results.

    Raises:
        ArgumentError: there is neither a sweep nor a measured link to fit, or a number is out of range.
    """
    if not all(2 <= n <= MOST_HOSTS for n in hosts):
        raise ArgumentError(f"hosts are {', '.join(map(str, hosts))}: expected 2 to {MOST_HOSTS:,} of them")
    fitted = fit_run(record, results, collective)
    rows = [row for size in sizes for row in predictions(fitted.link, collective, size, hosts)]
    return Forecast(fitted, tuple(rows), {n: crossovers(fitted.link, collective, n) for n in hosts})


def fit_run(record: dict[str, Any], results: dict[str, Any], collective: str) -> Fitted:
    """The link, from a collective's times, or from the measured links where it has fewer than three sizes.

    Raises:
        ArgumentError: it can be had from neither.
    """
    known = known_algorithms(collective)
    rows = [one for one in results["transfers"] if one["collective"] == collective]
    algorithm = rows[0]["algorithm"] if rows else ""
    form = known[0] if algorithm in ("", ENGINE) else algorithm
    timed = [
        (one["bytes"], one["time_s"]["p50"], closed_form(collective, form, len(one["ranks"])), len(one["ranks"]))
        for one in rows
        if one["time_s"]["p50"]
    ]
    if len({size for size, *_ in timed}) >= FEWEST_SIZES:
        link, source = fit([(size, seconds, terms) for size, seconds, terms, _ in timed]), "times"
    else:
        link, source = _slowest(record, _lacks(rows, len(timed), results["trials"], collective)), "links"
    points = tuple(Point(size, ranks, took, _seconds(terms, size, link)) for size, took, terms, ranks in timed)
    return Fitted(collective, algorithm, form, source, link, points)


def _seconds(terms: Terms, size: float, link: LinkFit) -> float:
    return terms.seconds(size, link.alpha_seconds, link.beta_seconds_per_byte)


def _lacks(rows: Sequence[Any], timed: int, trials: int, collective: str) -> str:
    """Why times are not enough."""
    if len(rows) > timed:
        return f"{trials} trials bound no median (it takes {fewest(0.5)})"
    return f"{len({one['bytes'] for one in rows})} sizes of {collective} do not make a fit (it takes {FEWEST_SIZES})"


def _slowest(record: dict[str, Any], lack: str) -> LinkFit:
    """The slowest of the measured links, which a collective has to wait for."""
    links = [link for _, link in record_links(record)]
    if not links:
        raise ArgumentError(f"{lack}, and no links were measured: run a sweep, --from 4KiB --to 4MiB --factor 4")
    return LinkFit(max(link.alpha_seconds for link in links), max(link.beta_seconds_per_byte for link in links))
