"""What the search finds, compared with published figures, with generators on uneven stages, and with the time it takes.

Each row is one search on one core. `penstock.simulate` checks and times the result before it is reported.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import penstock
from penstock.schedule import Placement
from penstock.simulate.costs import LinkCost, StageCost
from penstock.simulate.search import SearchResult, search

PUBLISHED = json.loads((Path(__file__).parents[2] / "tests" / "scaffolding" / "published.json").read_text())
UNIT = StageCost(1, 1, 1, activation_bytes=1, weight_gradient_bytes=1)
WEIGHT_SHARE = 32 / (34 + 5 * 32 * 1024 / 4096)
"""The share of an activation that W needs: M_W / M_B for 32 heads, width 4096 and 1024 tokens (Qi et al., 2024)."""
Row = dict[str, Any]


def published(seconds: float) -> Iterator[Row]:
    """Proven optima, the heuristics of the zero-bubble papers, and ZB-V with measured costs."""
    for row in PUBLISHED["proven_optima"]:
        placement = Placement.loop(row["ranks"]) if row["placement"] == "v1" else Placement.v(row["ranks"])
        for objective in ("makespan", "span"):
            if row[objective] is not None:
                limit = row["memory_limit"]
                found = search(
                    placement, row["microbatches"], UNIT, memory_limit=limit, objective=objective, seconds=seconds
                )
                case = (
                    f"optimum, {row['placement']}, p={row['ranks']} m={row['microbatches']} memory {limit}, {objective}"
                )
                yield measured(case, found) | {"published": row[objective], "reached": found.objective_seconds}
    for row in PUBLISHED["tables5and6"]:
        cost = StageCost(
            row["forward"],
            row["backward_input"],
            row["backward_weight"],
            activation_bytes=row["mem_forward"],
            weight_gradient_bytes=row["mem_weight"],
        )
        for name, times in (("zb-1p", 1), ("zb-2p", 2)):
            limit = times * row["ranks"] * row["mem_forward"]
            yield rate(f"{name}, {row['model']}", Placement.loop(row["ranks"]), cost, limit, row, name, seconds)
    for row in PUBLISHED["zbv_sweep"]:
        name = "zb-v (heuristic, memory limit p)"
        cost = StageCost(
            row["chunk_forward"],
            row["chunk_backward_input"],
            row["chunk_backward_weight"],
            activation_bytes=1,
            weight_gradient_bytes=WEIGHT_SHARE,
        )
        yield rate(f"zb-v, {row['model']}", Placement.v(row["ranks"]), cost, 2 * row["ranks"], row, name, seconds)
    cost = StageCost(4959, 5217, 3519, activation_bytes=1, weight_gradient_bytes=WEIGHT_SHARE)
    found = search(Placement.v(8), 24, cost, LinkCost(213), memory_limit=16, objective="span", seconds=seconds)
    yield measured("zb-v, p=8 m=24, span", found) | {"published": 688104, "reached": found.objective_seconds}


def rate(case: str, placement: Placement, cost: StageCost, limit: float, row: Row, name: str, seconds: float) -> Row:
    """Compares a bubble rate with the published one, which has four digits."""
    microbatches, link = row["microbatches"], LinkCost(row["comm"])
    found = search(placement, microbatches, cost, link, memory_limit=limit, objective="span", seconds=seconds)
    work = microbatches * (cost.forward_seconds + cost.backward_seconds) * placement.stages / placement.ranks
    case = f"{case}, p={row['ranks']} m={microbatches}, bubble rate"
    reached = round(1 - work / found.objective_seconds, 4)
    return measured(case, found) | {"published": row["bubble_rate"][name], "reached": reached}


def uneven(seconds: float) -> Iterator[Row]:
    """Uneven stages: the best generator that fits, and what the search finds in the same memory.

    The unit of time is one layer's F; I and W take as long. A projection onto the vocabulary takes time in proportion
    to its parameters.
    """
    llama = [4.0] * 7 + [6.4]  # 32 layers of 218 million parameters; the projection on 128,256 words has 525 million
    cases = {
        "one chunk, all stages alike": (Placement.loop(8), [4.0] * 8),
        "one chunk, vocabulary on the last": (Placement.loop(8), llama),
        "one chunk, layers moved off it": (Placement.loop(8), [4.0, 5.0, 4.0, 4.0, 4.0, 4.0, 4.0, 5.4]),
        "one chunk, one slow rank": (Placement.loop(8), [4.0] * 4 + [5.0] + [4.0] * 3),
        "two chunks in a loop, vocabulary on the last": (Placement.loop(8, 2), [2.0] * 15 + [4.4]),
        "two chunks in a V, vocabulary on the last": (Placement.v(8), [2.0] * 15 + [4.4]),
        "two chunks in a V, three layers moved off it": (Placement.v(8), [1.0] + [2.0] * 11 + [3.0] * 2 + [2.0, 3.4]),
    }
    for name, (placement, layers) in cases.items():
        chunks = placement.stages // placement.ranks
        costs = [StageCost(x, x, x, activation_bytes=x, weight_gradient_bytes=x * WEIGHT_SHARE) for x in layers]
        for times in (1, 2):
            # What 1F1B holds on the first rank, or twice that, in layers, with room for the heavier ones.
            limit = times * placement.ranks * max(sum(layers[s] for s in placement.stages_on(0)), 2.0 * chunks)
            found = search(placement, 24, costs, LinkCost(0.2), memory_limit=limit, seconds=seconds)
            gain = 1 - found.objective_seconds / found.baseline_seconds
            yield measured(f"{name}, memory {times}p", found) | {"shorter": round(gain, 4)}


def times(seconds: float) -> Iterator[Row]:
    """How long the search takes, and how close to the bound it gets."""
    for ranks, microbatches, allowed in ((8, 32, 5.0), (32, 256, 60.0)):
        for placement in (Placement.loop(ranks), Placement.v(ranks)):
            chunks = placement.stages // ranks
            cost = StageCost(1.0, 1.1, 0.8, activation_bytes=1, weight_gradient_bytes=WEIGHT_SHARE)
            limit = ranks * chunks
            # Some of the time goes to the known schedules, and to checking and timing the answer.
            asked = min(seconds, allowed * 0.95) if seconds < 1 else allowed * 0.95
            began = time.perf_counter()
            found = search(placement, microbatches, cost, LinkCost(0.1), memory_limit=limit, seconds=asked)
            spent = round(time.perf_counter() - began, 1)
            case = f"p={ranks} m={microbatches}, {'V' if chunks > 1 else 'one chunk'}"
            yield measured(case, found) | {"allowed_seconds": allowed, "spent_seconds": spent}


def measured(case: str, found: SearchResult) -> Row:
    return {
        "case": case,
        "found": round(found.objective_seconds, 4),
        "lower_bound": round(found.lower_bound_seconds, 4),
        "gap": round(found.gap, 5),
        "proven": found.proven,
        "generator": found.baseline,
        "generator_seconds": round(found.baseline_seconds, 4) if found.baseline else None,
        "search_seconds": round(found.search_seconds, 2),
    }


PARTS: dict[str, Callable[[float], Iterator[Row]]] = {"published": published, "uneven": uneven, "times": times}
COLUMNS = {
    "published": ("case", "published", "reached", "gap", "proven", "search_seconds"),
    "uneven": ("case", "generator", "generator_seconds", "found", "shorter", "gap", "search_seconds"),
    "times": ("case", "generator", "generator_seconds", "found", "gap", "spent_seconds", "allowed_seconds"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="for each search, but those that have a time of their own"
    )
    parser.add_argument("--out", type=Path, help="where the numbers go, as JSON")
    options = parser.parse_args()
    if unknown := set(options.parts.split(",")) - PARTS.keys():
        parser.error(f"--parts: {', '.join(sorted(unknown))}; expected of {', '.join(PARTS)}")
    console = Console(width=150)
    results: Row = {"penstock": penstock.__version__, "python": platform.python_version(), "seconds": options.seconds}
    for part in options.parts.split(","):
        table = Table(*COLUMNS[part], title=part)
        results[part] = []
        for row in PARTS[part](options.seconds):
            results[part].append(row)
            table.add_row(*(str(row[column]) for column in COLUMNS[part]))
            print(f"{part}: {row['case']}: {row['found']}", file=sys.stderr, flush=True)
        console.print(table)
    if options.out:
        options.out.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
