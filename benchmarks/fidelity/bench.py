"""How far replays are from published measurements: the costs are given, only the schedule's time is predicted.

Error: predicted / measured - 1. Nothing is fitted. Sets that are a model's output are reported apart.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock.schedule import generate
from penstock.simulate import LinkCost, StageCost, simulate

DATA = Path(__file__).with_name("data")
ADAM_BYTES, HBM_BYTES_PER_SECOND = 34, 2.0e12
"""What mixed-precision Adam reads and writes for a parameter, and an A100's peak bandwidth: an optimizer's estimate."""


@dataclass(frozen=True)
class Result:
    """The errors of one set, beside those of the source's own tool (or a closed form) where it is published.

    Attributes:
        errors: predicted / measured - 1.
        theirs: the same figure of theirs, in percent, and what it is.
    """

    name: str
    figure: str
    errors: tuple[float, ...]
    theirs: str
    aim: str
    measured: bool = True

    @property
    def mean(self) -> float:
        """In percent, as the other figures."""
        return 100 * statistics.fmean(map(abs, self.errors))

    @property
    def median(self) -> float:
        return 100 * statistics.median(map(abs, self.errors))

    @property
    def worst(self) -> float:
        return 100 * max(map(abs, self.errors))


# -- vocabularies -----------------------------------------------------------------------------------------------------


def vocabulary() -> list[Result]:
    """8 GPUs, 128 microbatches: plain 1F1B, and with a vocabulary pass of every microbatch on every rank."""
    plain, other = (json.loads((DATA / f"vocab_{name}.json").read_text()) for name in ("1f1b", "other"))
    message = {
        setting: statistics.fmean(row["round_trip_us"] for row in other if row["setting"] == setting) / 2e6
        for setting in {row["setting"] for row in other}
    }
    found = []
    for method, rows in (("plain 1F1B", plain), *by_method(other)):
        name, aim = f"vocabulary, {method}", "MAPE 0.7, worst 1.4" if rows is plain else "MAPE 1"
        theirs = f"closed form {summed(closed_form(row) / measured(row) - 1 for row in rows)}"
        for how, block, more in (
            ("half a round trip as latency", False, 0.0),
            ("sends block", True, 0.0),
            ("sends block, optimizer from specs", True, 1.0),
        ):
            errors = tuple(
                (replayed(row, message[row["setting"]], block=block) + more * optimizer(row)) / measured(row) - 1
                for row in rows
            )
            found.append(Result(f"{name}: {how}", "step", errors, theirs, aim))
    return found


def by_method(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Mapping[str, Any]]]]:
    methods = sorted({row["method"] for row in rows})
    return [(method, [row for row in rows if row["method"] == method]) for method in methods]


def stage_seconds(row: Mapping[str, Any]) -> list[tuple[float, float]]:
    """F and B of each stage. A vocabulary pass, which the plain schedule does not have, counts as part of B."""
    none = [0] * row["ranks"]
    embedding = (row.get("embedding_forward_us", none), row.get("embedding_backward_us", none))
    columns = zip(row["forward_us"], row["backward_us"], *embedding, row.get("vocab_us", none), strict=True)
    return [((f + e) / 1e6, (b + g + v) / 1e6) for f, b, e, g, v in columns]


def replayed(row: Mapping[str, Any], message_seconds: float, *, block: bool) -> float:
    """`block`: a rank that sends waits until the message has arrived, as in the traces below."""
    ranks, sent = row["ranks"], message_seconds if block else 0.0
    costs = [
        StageCost(f + sent * (rank < ranks - 1), b + sent * (rank > 0), 0)
        for rank, (f, b) in enumerate(stage_seconds(row))
    ]
    link = LinkCost(0.0 if block else message_seconds)
    return simulate(generate("1f1b", ranks, row["microbatches"]), costs, link).makespan_seconds


def closed_form(row: Mapping[str, Any]) -> float:
    """(m - 1) max(F + B) + sum(F + B)."""
    both = [f + b for f, b in stage_seconds(row)]
    return (row["microbatches"] - 1) * max(both) + sum(both)


def optimizer(row: Mapping[str, Any]) -> float:
    """The slowest stage's step of Adam, at the bandwidth of the memory."""
    layers = [12 * row["hidden"] ** 2 * count for count in row["layers_per_stage"]]
    vocabulary = row["vocab"] * row["hidden"]
    if "vocab_us" in row:
        layers = [size + 2 * vocabulary // row["ranks"] for size in layers]
    else:
        layers[0], layers[-1] = layers[0] + vocabulary, layers[-1] + vocabulary
    return max(layers) * ADAM_BYTES / HBM_BYTES_PER_SECOND


def measured(row: Mapping[str, Any]) -> float:
    return float(row["step_ms"]) / 1000


# -- production traces ------------------------------------------------------------------------------------------------

TRACES = {"AR": ("0.18", "0.2"), "SE": ("0.8", "0.6"), "ST": ("0.07", "0.1")}
"""The median error with each op's own duration and the median transfer, as published with the traces, and our aim."""

Ops = dict[tuple[str, int, int | None], tuple[float, float]]
"""When each op of one step and replica started and ended, in seconds: by name, rank and microbatch."""


def traces() -> list[Result]:
    """The pipeline's span of each step and replica: 1F1B with each op's own duration."""
    found = []
    for name, (theirs, aim) in TRACES.items():
        runs = read(DATA / f"trace_{name}.csv.gz")
        transfer = statistics.median(seconds for ops in runs for seconds in transfers(ops).values())
        published = f"{theirs} (median)"
        for how, sends in (
            ("median transfer", Sends(transfer)),
            ("median transfer, sends block", Sends(transfer, block=True)),
            ("own transfers, sends block", Sends(None, block=True)),
        ):
            errors = tuple(replay_trace(ops, sends) for ops in runs)
            found.append(Result(f"trace {name}, {how}", "pipeline span", errors, published, f"median {aim}"))
        means = stage_means(runs)
        errors = tuple(replay_trace(ops, Sends(transfer), means) for ops in runs)
        found.append(Result(f"trace {name}, stages' means", "pipeline span", errors, "", ""))
    return found


def read(path: Path) -> list[Ops]:
    """The ops of each step and replica."""
    runs: dict[tuple[str, str], Ops] = {}
    with gzip.open(path, "rt") as file:
        for row in csv.DictReader(file):
            start, seconds = int(row["start_us"]) / 1e6, int(row["duration_us"]) / 1e6
            number = int(row["microbatch"]) if row["microbatch"] else None
            ops = runs.setdefault((row["step"], row["dp_rank"]), {})
            ops[row["op"], int(row["pp_rank"]), number] = (start, start + seconds)
    return list(runs.values())


def transfers(ops: Ops) -> dict[tuple[str, int, int | None], float]:
    """How long each message took, by its send: from when both sides were there until both were done."""
    found = {}
    for (name, rank, number), (start, end) in ops.items():
        if name.endswith("-send"):
            other = name.replace("send", "recv"), rank + (1 if name.startswith("forward") else -1), number
            if other in ops:
                found[name, rank, number] = max(end, ops[other][1]) - max(start, ops[other][0])
    return found


def seconds_of(ops: Ops, name: str, rank: int, number: int) -> float:
    start, end = ops[name, rank, number]
    return end - start


def stage_means(runs: Sequence[Ops]) -> dict[tuple[str, int], float]:
    """The mean duration of each stage's forward and backward over all runs."""
    every: dict[tuple[str, int], list[float]] = {}
    for ops in runs:
        for (name, rank, _), (start, end) in ops.items():
            if name.endswith("-compute"):
                every.setdefault((name, rank), []).append(end - start)
    return {key: statistics.fmean(values) for key, values in every.items()}


@dataclass(frozen=True)
class Sends:
    """What is said of messages: how long each takes (None: as long as it took), and whether a rank that sends waits."""

    seconds: float | None
    block: bool = False


def replay_trace(ops: Ops, sends: Sends, means: Mapping[tuple[str, int], float] | None = None) -> float:
    """The error of the span of one step and replica. A send that blocks its rank counts as part of the op before it."""
    compute = {key: times for key, times in ops.items() if key[0].endswith("-compute")}
    ranks, numbers = 1 + max(rank for _, rank, _ in compute), 1 + max(number or 0 for *_, number in compute)
    own = transfers(ops)

    def took(way: str, rank: int, number: int) -> float:
        name = f"{way}-compute"
        seconds = seconds_of(ops, name, rank, number) if means is None else means[name, rank]
        sent = own.get((f"{way}-send", rank, number))
        if sent is None or not sends.block:
            return seconds
        return seconds + (sent if sends.seconds is None else sends.seconds)

    costs = [
        [StageCost(took("forward", rank, k), took("backward", rank, k), 0) for k in range(numbers)]
        for rank in range(ranks)
    ]
    link = LinkCost(0.0 if sends.block else sends.seconds or 0.0)
    predicted = simulate(generate("1f1b", ranks, numbers), costs, link).makespan_seconds
    span = max(end for _, end in compute.values()) - min(start for start, _ in compute.values())
    return predicted / span - 1


# -- a model's output -------------------------------------------------------------------------------------------------


def vtrain_single() -> list[Result]:
    """By all signs a model's output: whether the part that grows with the batch has 1F1B's form, (m + p - 1) T.

    T is taken from two batch sizes of the same setting, and predicts all others.
    """
    settings: dict[tuple[str, ...], list[tuple[int, float]]] = {}
    with (DATA / "vtrain_single.csv").open() as file:
        for row in csv.DictReader(file):
            key = tuple(row[name] for name in ("micro_batch", "hidden", "heads", "layers", "seq", "tp", "dp", "pp"))
            microbatches = int(row["global_batch"]) // (int(row["micro_batch"]) * int(row["dp"]))
            settings.setdefault(key, []).append((microbatches, float(row["iteration_ms"])))
    errors = []
    for rows in settings.values():
        (m, one), (n, two), *others = [*sorted(rows), (0, 0.0), (0, 0.0)][: max(2, len(rows))]
        if n > m:
            errors += [(one + (two - one) / (n - m) * (k - m)) / value - 1 for k, value in others if k]
    return [Result("vTrain, one node", "step by a line in m", tuple(errors), "", "", measured=False)]


# -- the report -------------------------------------------------------------------------------------------------------


def summed(errors: Iterable[float]) -> str:
    sizes = [100 * abs(error) for error in errors]
    return f"{statistics.fmean(sizes):.2f}, worst {max(sizes):.2f}"


def show(results: Sequence[Result], title: str) -> None:
    table = Table(title=title, title_justify="left")
    for column in ("set", "figure", "rows", "MAPE %", "median %", "worst %", "theirs %", "aim %"):
        table.add_column(column, justify="left" if column in ("set", "figure", "theirs %", "aim %") else "right")
    for one in results:
        numbers = (f"{one.mean:.3f}", f"{one.median:.3f}", f"{one.worst:.3f}")
        table.add_row(one.name, one.figure, str(len(one.errors)), *numbers, one.theirs, one.aim)
    Console(width=150).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    chosen = parser.parse_args()
    results = [*vocabulary(), *traces(), *vtrain_single()]
    show([one for one in results if one.measured], "Replay: costs given, nothing fitted; against measurements")
    show([one for one in results if not one.measured], "A model's output, not a measurement")
    figures = [
        {"mape": round(one.mean, 4), "median": round(one.median, 4), "worst": round(one.worst, 4)}
        | {key: value for key, value in asdict(one).items() if key != "errors"}
        | {"rows": len(one.errors)}
        for one in results
    ]
    chosen.json.write_text(json.dumps({"replay": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
