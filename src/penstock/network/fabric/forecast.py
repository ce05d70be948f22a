"""Predict other sizes and host counts from a run: fit a link to its times, report how well it fits, and extrapolate.

A collective that was run at three or more sizes is fitted to the medians of its completion times, so that alpha is the
cost of one step of its algorithm on this system, software included. Otherwise the measured links stand in.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from penstock._base.words import counted
from penstock.errors import ArgumentError
from penstock.network.fabric.algorithms import algorithms, generate
from penstock.network.fabric.algorithms.volume import is_even
from penstock.network.fabric.models import (
    HOSTS,
    LinkFit,
    Prediction,
    crossovers,
    fit,
    predictions,
    record_links,
    slowest_of,
)
from penstock.network.fabric.statistics import fewest
from penstock.network.fabric.terms import busbw_factor, closed_form
from penstock.network.fabric.times import iterations_of, rate_key
from penstock.schedule.placement import MAX_RANKS

FEWEST_SIZES = 3
"""With fewer sizes of a collective, the residuals of a fit mean nothing."""


class Point(NamedTuple):
    """A measured size: the median of its completion times, and what the fit says."""

    bytes: int
    ranks: int
    measured_seconds: float
    fitted_seconds: float

    @property
    def residual(self) -> float:
        """The error as a fraction of the measured time; positive where the collective took longer than the fit says."""
        return (self.measured_seconds - self.fitted_seconds) / self.measured_seconds


@dataclass(frozen=True, slots=True)
class Fitted:
    """The link as one collective of a run sees it.

    Attributes:
        algorithm: the one the run used; empty if the run has no such collective.
        form: the algorithm whose closed form was fitted; for the engine's own collectives, our default algorithm.
        held: True if the times alone implied a faster link than was measured, and beta was held at the measured value.
        lack: why the times could not be fitted; empty if they were.
    """

    collective: str
    algorithm: str
    form: str
    link: LinkFit
    points: tuple[Point, ...]
    held: bool = False
    lack: str = ""

    @property
    def source(self) -> str:
        """The "times" of the run's transfers, or the "links" measured before its trials."""
        return "links" if self.lack else "times"

    @property
    def largest_residual(self) -> float:
        """The largest absolute residual; 0 if no size was measured."""
        return max((abs(point.residual) for point in self.points), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict that can be serialized as JSON."""
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
                dict(zip(("bytes", "ranks", "measured_s", "fitted_s"), one, strict=True)) | {"residual": one.residual}
                for one in self.points
            ],
        }


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run predicts for one collective.

    Attributes:
        rows: ordered by size, then by number of hosts.
        crossovers: for each number of hosts, the sizes from which each algorithm is the fastest.
    """

    fitted: Fitted
    rows: tuple[Prediction, ...]
    crossovers: dict[int, list[tuple[float, str]]]

    def to_dict(self) -> dict[str, Any]:
        """Returns a dict that can be serialized as JSON."""
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
    """Predicts the times of a collective from a run's record and results.

    Raises:
        ArgumentError: there is neither a sweep nor a measured link to fit, or a number is out of range.
    """
    if not all(2 <= n <= MAX_RANKS for n in hosts):
        raise ArgumentError(f"hosts={', '.join(map(str, hosts))}: expected numbers from 2 to {MAX_RANKS:,}")
    fitted = _fitted(record, results, collective)
    if isinstance(fitted, str):
        raise ArgumentError(f"{fitted}, and no links were measured: run a sweep, --from 4KiB --to 4MiB --factor 4")
    return _carried(fitted, sizes, hosts)


def forecasts(record: dict[str, Any], results: dict[str, Any]) -> Iterator[Forecast]:
    """Yields a forecast for each collective whose own times determine a link: its largest size, on up to 4096 hosts."""
    for collective in dict.fromkeys(one["collective"] for one in results["transfers"]):
        fitted = _fitted(record, results, collective)
        if not isinstance(fitted, str) and not fitted.lack:
            yield _carried(fitted, [max(point.bytes for point in fitted.points)], HOSTS)


def _carried(fitted: Fitted, sizes: Sequence[int], hosts: Sequence[int]) -> Forecast:
    """Extrapolates a fit to other sizes and host counts."""
    link, collective = fitted.link, fitted.collective
    numbers = (2,) if collective == "send" else hosts  # a message involves two ranks, however many hosts there are
    rows = [row for size in sizes for row in predictions(link, collective, size, numbers)]
    return Forecast(fitted, tuple(rows), {n: crossovers(link, collective, n) for n in numbers})


def _fitted(record: dict[str, Any], results: dict[str, Any], collective: str) -> Fitted | str:
    """Fits the link to a collective's median times, no faster than measured. With too few sizes, the slowest measured
    link stands in, which a collective must wait for; if none was measured, returns what is lacking."""
    # Uneven collectives have no closed form.
    rows = [one for one in results["transfers"] if one["collective"] == collective and not one.get("shares")]
    algorithm = rows[0]["algorithm"] if rows else ""
    form = _form(collective, algorithm)
    medians = [(one["bytes"], len(one["ranks"]), one[rate_key(collective)]["p50"]) for one in rows]
    timed = [(size, ranks, median, closed_form(collective, form, ranks)) for size, ranks, median in medians if median]
    lack, held = "", False
    if not rows:
        lack = f"the run has no {collective} to fit"
    elif len({size for size, *_ in timed}) < FEWEST_SIZES:
        lack = f"{results['trials']} trials are too few for a median (it needs {fewest(0.5)})"
        if len(rows) == len(timed):
            sizes = counted(len({size for size, *_ in timed}), "size")
            lack = f"{sizes} of {collective} cannot be fitted (a fit needs {FEWEST_SIZES})"
    if lack:
        links = [link for _, link in record_links(record)]
        if not links:
            return lack
        link = slowest_of(links)
    else:
        points = [(size, median, terms) for size, _, median, terms in timed]
        link, measured = fit(points), _limiting(record, rows, form)
        held = measured is not None and link.beta_seconds_per_byte < measured.beta_seconds_per_byte
        if measured is not None and held:
            link = fit(points, measured.beta_seconds_per_byte)
    shown = tuple(Point(size, ranks, median, link.seconds(terms, size)) for size, ranks, median, terms in timed)
    return Fitted(collective, algorithm, form, link, shown, held, lack)


def _limiting(record: dict[str, Any], rows: Sequence[dict[str, Any]], form: str) -> LinkFit | None:
    """Returns the link that limits transfers, of those measured between their ranks; None if none was measured.

    If the steps load all ports equally, so that everyone waits for the slowest link, that link counts. Otherwise the
    fastest does, because slow links may have little to carry.
    """
    among = {rank for one in rows for rank in one["ranks"]}
    links = [link for ends, link in record_links(record) if among.issuperset(ends)]
    sizes = {(one["collective"], len(one["ranks"])) for one in rows}
    most = max if all(is_even(generate(collective, form, ranks)) for collective, ranks in sizes) else min
    if not links:
        return None
    return LinkFit(most(one.alpha_seconds for one in links), most(one.beta_seconds_per_byte for one in links))


def network_seconds(record: dict[str, Any], one: dict[str, Any]) -> float:
    """Returns what a transfer, an entry of the results, takes on the measured links; 0 if none was measured.

    A message leaves only after its receiver has signaled that it is ready. Receivers signal one round ahead, so this
    delays only the first of back-to-back iterations.
    """
    form, ranks = _form(one["collective"], one["algorithm"]), len(one["ranks"])
    link = _limiting(record, [one], form) or _limiting(record, [{**one, "ranks": range(int(record["hosts"]))}], form)
    if link is None:
        return 0.0
    terms = closed_form(one["collective"], form, ranks)
    if one["shares"]:
        terms = terms._replace(bytes_factor=busbw_factor(one["collective"], ranks, one["shares"]))
    return link.seconds(terms, one["bytes"]) + link.alpha_seconds / iterations_of(record)


def _form(collective: str, algorithm: str) -> str:
    """Returns the algorithm whose closed form stands for one: for the engine's own, our default."""
    known = algorithms(collective)
    return algorithm if algorithm in known else known[0]
