"""From a run to other sizes and numbers of hosts: the link that its times fit, how well, and what that predicts.

A collective that the run has in three sizes or more is fitted by the medians of its completion times, so that alpha is
what a step of its algorithm costs there, software included. Otherwise the links that were measured stand in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock.errors import ArgumentError
from penstock.fabric.algorithms import generate
from penstock.fabric.algorithms.volume import is_even
from penstock.fabric.models import (
    HOSTS,
    LinkFit,
    Prediction,
    crossovers,
    fit,
    predictions,
    record_links,
    slowest_of,
)
from penstock.fabric.statistics import fewest
from penstock.fabric.terms import Terms, closed_form, known_algorithms
from penstock.fabric.times import rate_key

FEWEST_SIZES = 3
"""Of a collective, below which a fit has no residuals worth the name."""

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
        held: the times alone would have the link faster than it was measured; beta is the measured one.
        lack: why it could not be by times; empty if it is.
    """

    collective: str
    algorithm: str
    form: str
    source: str
    link: LinkFit
    points: tuple[Point, ...]
    held: bool = False
    lack: str = ""

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
            "held_to_links": self.held,
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
    return _carried(fit_run(record, results, collective), sizes, hosts)


def forecasts(record: dict[str, Any], results: dict[str, Any]) -> Iterator[Forecast]:
    """Of each collective whose own times tell a link, of its largest size on up to 4096 hosts."""
    for collective in dict.fromkeys(one["collective"] for one in results["transfers"]):
        fitted = _by_times(record, results, collective)
        if fitted is not None:
            yield _carried(fitted, [max(point.bytes for point in fitted.points)], HOSTS)


def _carried(fitted: Fitted, sizes: Sequence[int], hosts: Sequence[int]) -> Forecast:
    """To other sizes and hosts."""
    link, collective = fitted.link, fitted.collective
    numbers = (2,) if collective == "send" else hosts  # a message is between two, however many there are
    rows = [row for size in sizes for row in predictions(link, collective, size, numbers)]
    return Forecast(fitted, tuple(rows), {n: crossovers(link, collective, n) for n in numbers})


def fit_run(record: dict[str, Any], results: dict[str, Any], collective: str) -> Fitted:
    """The link, from a collective's times, or from the measured links where it has fewer than three sizes.

    Raises:
        ArgumentError: it can be had from neither.
    """
    fitted = _by_times(record, results, collective)
    if fitted is not None:
        return fitted
    rows, algorithm, form = _rows(results, collective)
    timed = _timed(rows, form)
    lack = _lacks(rows, len(timed), results["trials"], collective)
    link = _slowest(record, lack)
    return Fitted(collective, algorithm, form, "links", link, _points(timed, link), lack=lack)


def _by_times(record: dict[str, Any], results: dict[str, Any], collective: str) -> Fitted | None:
    """The link that explains the medians of a collective, no faster than measured; None if it has too few sizes."""
    rows, algorithm, form = _rows(results, collective)
    timed = _timed(rows, form)
    if len({one.bytes for one in timed}) < FEWEST_SIZES:
        return None
    points = [(one.bytes, one.seconds, one.terms) for one in timed]
    free, least = fit(points), _least_beta(record, rows, form)
    held = free.beta_seconds_per_byte < least
    link = fit(points, least) if held else free
    return Fitted(collective, algorithm, form, "times", link, _points(timed, link), held)


def _least_beta(record: dict[str, Any], rows: Sequence[dict[str, Any]], form: str) -> float:
    """Seconds a byte that the links between the transfers' ranks were measured at; 0 where none was.

    Of the slowest link where the steps load all ports alike, so that all wait for it; else of the fastest: the slow
    ones may have little to carry.
    """
    among = {rank for one in rows for rank in one["ranks"]}
    betas = [link.beta_seconds_per_byte for ends, link in record_links(record) if among.issuperset(ends)]
    sizes = {(one["collective"], len(one["ranks"])) for one in rows}
    even = all(is_even(generate(collective, form, ranks)) for collective, ranks in sizes)
    return (max if even else min)(betas, default=0.0)


class _Timed(NamedTuple):
    """A transfer whose median is known."""

    bytes: int
    ranks: int
    seconds: float
    terms: Terms


def _rows(results: dict[str, Any], collective: str) -> tuple[list[dict[str, Any]], str, str]:
    """The transfers of a collective, their algorithm, and the one whose closed form is taken for it."""
    # Uneven collectives have no closed form.
    rows = [one for one in results["transfers"] if one["collective"] == collective and not one.get("shares")]
    algorithm = rows[0]["algorithm"] if rows else ""
    known = known_algorithms(collective)
    return rows, algorithm, algorithm if algorithm in known else known[0]


def _timed(rows: Sequence[dict[str, Any]], form: str) -> list[_Timed]:
    found = []
    for one in rows:
        median, ranks = one[rate_key(one["collective"])]["p50"], len(one["ranks"])
        if median:
            found.append(_Timed(one["bytes"], ranks, median, closed_form(one["collective"], form, ranks)))
    return found


def _points(timed: Sequence[_Timed], link: LinkFit) -> tuple[Point, ...]:
    return tuple(Point(one.bytes, one.ranks, one.seconds, _seconds(one.terms, one.bytes, link)) for one in timed)


def _seconds(terms: Terms, size: float, link: LinkFit) -> float:
    return terms.seconds(size, link.alpha_seconds, link.beta_seconds_per_byte)


def _lacks(rows: Sequence[Any], timed: int, trials: int, collective: str) -> str:
    """Why times are not enough."""
    if not rows:
        return f"the run has no {collective} to fit"
    if len(rows) > timed:
        return f"{trials} trials bound no median (it takes {fewest(0.5)})"
    return f"{len({one['bytes'] for one in rows})} sizes of {collective} do not make a fit (it takes {FEWEST_SIZES})"


def _slowest(record: dict[str, Any], lack: str) -> LinkFit:
    """The slowest of the measured links, which a collective has to wait for."""
    links = [link for _, link in record_links(record)]
    if not links:
        raise ArgumentError(f"{lack}, and no links were measured: run a sweep, --from 4KiB --to 4MiB --factor 4")
    return slowest_of(links)
