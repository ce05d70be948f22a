"""The alpha-beta cost model of collectives: fit measured times, report how well it fits, and predict others.

    seconds = rounds * alpha + bytes * bytes_factor * beta

alpha is the fixed cost of a message in seconds; beta is in seconds per byte (R. Hockney, The communication challenge
for MPP, 1994). The model assumes that each rank has one full-duplex port, that the network between the ports is never
the bottleneck, and that adding is free. Its closed forms are in `algorithms`.

A collective that was run at three or more sizes is fitted to the medians of its completion times, so that alpha is the
cost of one step of its algorithm on this system, software included. Otherwise the measured links stand in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from penstock._base.errors import ArgumentError
from penstock._base.formatting import pluralize
from penstock.network.fabric.algorithms import algorithms, busbw_factor, closed_form, generate, or_default
from penstock.network.fabric.samples import RunRecord, rate_key
from penstock.network.fabric.statistics import min_samples
from penstock.network.fabric.steps import Terms, is_even
from penstock.schedule.placement import MAX_RANKS


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
        """Return the time of a collective of this cost and size."""
        return terms.rounds * self.alpha_seconds + size_bytes * terms.bytes_factor * self.beta_seconds_per_byte


def fit(points: Sequence[tuple[float, float, Terms]], min_beta: float = 0.0) -> LinkFit:
    """Fit alpha and beta, both non-negative, by least squares.

    It minimizes relative residuals, so that small sizes count as much as large ones.

    Args:
        points: (bytes, seconds, terms) of each measurement, for example a median. Algorithms and numbers of ranks may
            be mixed.
        min_beta: a lower bound on beta, in seconds per byte, because the wire is no faster.

    Raises:
        ArgumentError: a time is not positive, or the points cannot separate alpha from beta: fewer than two differ.
    """
    from scipy.optimize import nnls  # takes a second to import

    if any(not 0 < seconds < math.inf or size < 0 for size, seconds, _ in points):
        raise ArgumentError("expected times above 0 and sizes of 0 or more: pass measured seconds, and sizes in bytes")
    seconds = np.array([point[1] for point in points])
    raw = np.array([(terms.rounds, size * terms.bytes_factor) for size, _, terms in points], float).reshape(-1, 2)
    columns = raw / seconds[:, None]
    norms = np.linalg.norm(columns, axis=0)
    if len(points) < 2 or not norms.all() or np.linalg.matrix_rank(columns / norms, 1e-9) < 2:
        raise ArgumentError(f"{len(points)} points cannot separate latency from bandwidth: pass two or more sizes")
    target = 1 - columns[:, 1] * min_beta
    alpha, beta = nnls(columns / norms, target)[0] / norms + (0.0, min_beta)
    fitted = columns @ np.array([alpha, beta])
    weights = seconds**-2.0
    mean = float((weights * seconds).sum() / weights.sum())
    spread = float((weights * (seconds - mean) ** 2).sum())
    residual = float(((1 - fitted) ** 2).sum())
    r2 = 1 - residual / spread if spread > 0 else float(residual == 0)
    return LinkFit(float(alpha), float(beta), r2)


def predict(link: LinkFit, collective: str, algorithm: str, ranks: int, size_bytes: float) -> float:
    """Predict the seconds that a collective takes. Raise ArgumentError if there is no such algorithm."""
    return link.seconds(closed_form(collective, algorithm, ranks), size_bytes)


def crossovers(link: LinkFit, collective: str, ranks: int) -> list[tuple[float, str]]:
    """Return the size from which each algorithm is the fastest: (bytes, algorithm), the first entry from 0 on.

    Among algorithms that cost the same at all sizes, the first in `algorithms` stands for all.
    """
    lines = []
    for name in algorithms(collective):
        terms = closed_form(collective, name, ranks)
        lines.append((terms.rounds * link.alpha_seconds, terms.bytes_factor * link.beta_seconds_per_byte, name))
    fixed, slope, best = min(lines, key=lambda line: line[:2])
    fastest = [(0.0, best)]
    while steeper := [line for line in lines if line[1] < slope]:  # only a smaller slope overtakes
        size, _, (fixed, slope, best) = min(
            (((line[0] - fixed) / (slope - line[1]), line[1], line) for line in steeper), key=lambda entry: entry[:2]
        )
        fastest.append((size, best))
    return fastest


def record_links(record: RunRecord) -> list[tuple[tuple[int, int], LinkFit]]:
    """Return the measured links of a run's record, in order; no bandwidth in the record means an infinite one."""
    links = []
    for link in record.links:
        rate = link["bytes_per_second"]
        links.append(((link["from"], link["to"]), LinkFit(link["latency_seconds"], 1 / rate if rate else 0.0)))
    return links


def limiting_link(links: Iterable[LinkFit], select: Callable[..., float] = max) -> LinkFit | None:
    """Combine the largest alpha and beta of links (`select=min`: the smallest), which limit a collective of any size;
    None without links."""
    fits = tuple(links)
    if not fits:
        return None
    return LinkFit(select(link.alpha_seconds for link in fits), select(link.beta_seconds_per_byte for link in fits))


def links_json(record: RunRecord, model: Iterable[dict[str, Any]] = ()) -> dict[str, Any] | None:
    """Return a run's links as `penstock simulate --links` reads them: those measured or, if none were, the slowest of
    the fits in its results' `model`; None if there are neither.

    Pairs that were not measured get the slowest measured values, as "all".
    """
    pairs = dict(record_links(record))
    fits = [LinkFit(entry["fit"]["alpha_seconds"], entry["fit"]["beta_seconds_per_byte"]) for entry in model]
    slowest = limiting_link(pairs.values() or fits)
    if slowest is None:
        return None
    links = [{"from": source, "to": target, **_link(link)} for (source, target), link in pairs.items()]
    return {"units": "latency in seconds, bandwidth in bytes per second", "links": links, "all": _link(slowest)}


def _link(link: LinkFit) -> dict[str, float]:
    rate = {"bandwidth": link.bytes_per_second} if link.beta_seconds_per_byte else {}
    return {"latency": link.alpha_seconds, **rate}


# -- predictions from a run --------------------------------------------------------------------------------------------

HOSTS = tuple(2**power for power in range(1, 13))
"""The numbers of hosts to predict for, if none are given."""

MIN_SIZES = 3
"""With fewer sizes of a collective, the residuals of a fit mean nothing."""


def forecast(
    record: RunRecord, results: dict[str, Any], collective: str, sizes: Sequence[int], hosts: Sequence[int]
) -> dict[str, Any]:
    """Predict the times of a collective from a run's record and results.

    Returns an entry of `penstock fabric predict --json`: `fit` (see `_fit`), `predictions` by size and number of hosts,
    and `crossovers`, the sizes from which each algorithm is the fastest. Raises ArgumentError: there is neither a sweep
    nor a measured link to fit, or a number is out of range.
    """
    if not all(2 <= n <= MAX_RANKS for n in hosts):
        raise ArgumentError(f"hosts={', '.join(map(str, hosts))}: expected numbers from 2 to {MAX_RANKS:,}")
    return _extrapolate(_fit(record, results, collective), sizes, hosts)


def forecasts(record: RunRecord, results: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a forecast for each collective whose own times determine a link: its largest size, on up to 4096 hosts."""
    for collective in dict.fromkeys(transfer["collective"] for transfer in results["transfers"]):
        with suppress(ArgumentError):
            if (fitted := _fit(record, results, collective))["source"] == "times":
                yield _extrapolate(fitted, [max(point["bytes"] for point in fitted["sizes"])], HOSTS)


def _extrapolate(fitted: dict[str, Any], sizes: Sequence[int], hosts: Sequence[int]) -> dict[str, Any]:
    """Extrapolate a fit to other sizes and host counts."""
    link, collective = LinkFit(fitted["alpha_seconds"], fitted["beta_seconds_per_byte"]), fitted["collective"]
    numbers = (2,) if collective == "send" else hosts  # a message involves two ranks, however many hosts there are
    rows = []
    for size, n in product(sizes, numbers):
        seconds = {name: predict(link, collective, name, n, size) for name in algorithms(collective)}
        best = min(seconds, key=seconds.__getitem__)
        rate = size * busbw_factor(collective, n) / seconds[best] / 1e9 if seconds[best] else None
        rows.append({"hosts": n, "bytes": size, "seconds": seconds, "best": best, "busbw_GBps": rate})
    fastest = [
        {"hosts": n, "from": [{"bytes": size, "algorithm": name} for size, name in crossovers(link, collective, n)]}
        for n in numbers
    ]
    return {"fit": fitted, "predictions": rows, "crossovers": fastest}


def _fit(record: RunRecord, results: dict[str, Any], collective: str) -> dict[str, Any]:
    """Fit the link to a collective's median times, no faster than measured.

    With too few sizes, the slowest measured link stands in, which a collective must wait for. Then `source` is "links"
    instead of "times", and `lack` says why. `form` is the algorithm whose closed form was fitted. `held_to_links`: the
    times alone implied a faster link than was measured. A residual is a fraction of the measured time, positive where
    the collective took longer than the fit says. Raises ArgumentError if there is no measured link either.
    """
    # Uneven collectives have no closed form.
    rows = [row for row in results["transfers"] if row["collective"] == collective and not row.get("shares")]
    algorithm = rows[0]["algorithm"] if rows else ""
    form = or_default(collective, algorithm)  # the engine's own algorithm is unknown
    medians = [(row["bytes"], len(row["ranks"]), row[rate_key(collective)]["p50"]) for row in rows]
    timed = [(size, ranks, median, closed_form(collective, form, ranks)) for size, ranks, median in medians if median]
    sizes, reason, is_limited = len({size for size, *_ in timed}), "", False
    if not rows:
        reason = f"the run has no {collective} to fit"
    elif sizes < MIN_SIZES and len(rows) == len(timed):
        reason = f"{pluralize(sizes, 'size')} of {collective} cannot be fitted (a fit needs {MIN_SIZES})"
    elif sizes < MIN_SIZES:
        reason = f"{results['trials']} trials are too few for a median (it needs {min_samples(0.5)})"
    if reason:
        link = limiting_link(link for _, link in record_links(record))
        if link is None:
            raise ArgumentError(f"{reason}, and no links were measured: run a sweep, --from 4KiB --to 4MiB --factor 4")
    else:
        points = [(size, median, terms) for size, _, median, terms in timed]
        link, measured = fit(points), _limiter(record, rows, form)
        is_limited = measured is not None and link.beta_seconds_per_byte < measured.beta_seconds_per_byte
        if measured is not None and is_limited:
            link = fit(points, measured.beta_seconds_per_byte)
    fitted_sizes = []
    for size, ranks, median, terms in timed:
        fitted = link.seconds(terms, size)
        point = {"bytes": size, "ranks": ranks, "measured_s": median, "fitted_s": fitted}
        fitted_sizes.append({**point, "residual": (median - fitted) / median})
    beta = link.beta_seconds_per_byte
    return {
        "collective": collective,
        "algorithm": algorithm or None,
        "form": form,
        "source": "links" if reason else "times",
        "lack": reason or None,
        "alpha_seconds": link.alpha_seconds,
        "beta_seconds_per_byte": beta,
        "bytes_per_second": 1 / beta if beta else None,
        "held_to_links": is_limited,
        "r2": None if reason else link.r2,
        "largest_residual": max((abs(point["residual"]) for point in fitted_sizes), default=None),
        "sizes": fitted_sizes,
    }


def _limiter(record: RunRecord, rows: Sequence[dict[str, Any]], form: str) -> LinkFit | None:
    """Return the link that limits transfers, of those measured between their ranks; None if none was measured.

    If the steps load all ports equally, so that everyone waits for the slowest link, that link counts. Otherwise the
    fastest does, because slow links may have little to carry.
    """
    members = {rank for row in rows for rank in row["ranks"]}
    sizes = {(row["collective"], len(row["ranks"])) for row in rows}
    select = max if all(is_even(generate(collective, form, ranks)) for collective, ranks in sizes) else min
    return limiting_link((link for ends, link in record_links(record) if members.issuperset(ends)), select)


def network_seconds(record: RunRecord, entry: dict[str, Any]) -> float:
    """Return what a transfer, an entry of the results, takes on the measured links; 0 if none was measured.

    A message leaves only after its receiver has signaled that it is ready. Receivers signal one round ahead, so this
    delays only the first of back-to-back iterations.
    """
    form, ranks = or_default(entry["collective"], entry["algorithm"]), len(entry["ranks"])
    link = _limiter(record, [entry], form) or _limiter(record, [{**entry, "ranks": range(record.hosts)}], form)
    if link is None:
        return 0.0
    terms = closed_form(entry["collective"], form, ranks)
    if entry["shares"]:
        terms = terms._replace(bytes_factor=busbw_factor(entry["collective"], ranks, entry["shares"]))
    return link.seconds(terms, entry["bytes"]) + link.alpha_seconds / record.iterations
