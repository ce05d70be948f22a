"""Whether the advice of `penstock explain` holds when it is followed.

.venv/bin/python benchmarks/advice/bench.py                    # all: up to 25 minutes; writes results.json
.venv/bin/python benchmarks/advice/bench.py --quick --json /tmp/quick.json
.venv/bin/python benchmarks/advice/bench.py --show             # the tables of results.json, in Markdown
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

from common.machine import environment, noting_others, others_share

RESULTS = Path(__file__).with_name("results.json")
QUICK = {"tiny MLP", "CNN"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="+", help="by default all")
    parser.add_argument("--rounds", type=int, default=101, help="steps of each contestant, at most")
    parser.add_argument("--quick", action="store_true", help="two models on two ranks, four and eight microbatches")
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--rank-folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_folder is not None:
        compete_here(options)
        return
    if not options.show:
        found = {"environment": environment(), "runs": []}
        with noting_others(found["environment"]):
            for ranks in [2] if options.quick else options.ranks:
                found["runs"] += in_processes(ranks)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    for line in report(json.loads(options.json.read_text())):
        print(line)


def in_processes(ranks: int) -> list[dict[str, Any]]:
    """Runs this script in so many processes. Returns what they measured."""
    from penstock.distributed.launch.processes import launch

    with tempfile.TemporaryDirectory() as folder:
        if status := launch([__file__, *sys.argv[1:], "--rank-folder", folder], ranks, threads=1):
            sys.exit(status)
        found: list[dict[str, Any]] = json.loads((Path(folder) / "found.json").read_text())
    return found


def compete_here(options: argparse.Namespace) -> None:
    """In each process: all runs, one after the other."""
    import torch
    import torch.distributed as dist
    from contest import MODELS, compete, profiled, runs

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    models = [name for name in MODELS if name in (QUICK if options.quick else options.models or MODELS)]
    found, profiles = [], {name: profiled(name) for name in models}
    for run in runs(dist.get_world_size(), models):
        if options.quick and run.microbatches > 8:
            continue
        found.append(compete(run, profiles[run.model], options.rounds))
        if dist.get_rank() == 0:
            print(*lines_of(found[-1]), sep="\n", flush=True)
    if dist.get_rank() == 0:
        (options.rank_folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# -- the tables -------------------------------------------------------------------------------------------------------


def holds(advice: dict[str, Any]) -> bool:
    """Whether what happened is what was claimed, as far as the measurement tells."""
    low = advice["gain"] - advice["error"] if advice["measured"] else -1e9
    return bool(low - advice["noise"] <= advice["happened"] <= advice["gain"] + advice["error"] + advice["noise"])


def lines_of(run: dict[str, Any]) -> Iterator[str]:
    """A row for each piece of advice; one that says so if there was none."""
    name = f"| {run['model']} | {run['ranks']} | {run['schedule']} | {run['microbatches']}"
    if not run["advice"]:
        yield f"{name} | | nothing to change | | | |"
    for one in run["advice"]:
        if "happened" in one:
            happened, verdict = f"{-one['happened']:+.1%} ± {one['noise']:.1%}", "yes" if holds(one) else "**no**"
        else:
            happened, verdict = one.get("failed") or "not for a script", ""
        text = one["text"].replace("|", "/")
        yield f"{name} | {one['source']} | {text} | {one['claim']} | {happened} | {verdict} |"


def report(found: dict[str, Any]) -> Iterator[str]:
    """What was aimed at, then every piece of advice."""
    followed = [one for run in found["runs"] for one in run["advice"] if "happened" in one]
    certain = [one for one in followed if one["measured"]]
    slower = [one for one in certain if one["happened"] < -one["noise"]]
    yield f"{len(found['runs'])} runs, {len(followed)} pieces of advice followed; {others_share(found['environment'])}"
    yield ""
    yield "| aimed at | measured |"
    yield "|---|---|"
    yield f"| no claimed gain makes a step slower | {len(slower)} of {len(certain)} did |"
    if certain:
        errors = [abs(one["gain"] - one["happened"]) for one in certain]
        covered = sum(map(holds, certain))
        yield f"| at least 90% of intervals cover what happened | {covered} of {len(certain)} |"
        yield f"| the median error of claimed gains is at most 3 points | {100 * statistics.median(errors):.1f} |"
    most = [one for one in followed if not one["measured"]]
    yield f"| no gain is larger than 'at most' says | {sum(map(holds, most))} of {len(most)} |"
    yield ""
    yield from table(found["runs"])


def table(runs: Sequence[dict[str, Any]]) -> Iterator[str]:
    yield "| model | ranks | schedule | m | by | advice | claim | happened | covered |"
    yield "|---|--:|---|--:|---|---|--:|--:|---|"
    for run in runs:
        yield from lines_of(run)


if __name__ == "__main__":
    main()
