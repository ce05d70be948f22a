"""Predicted steps against measured ones, and the planner's choice against every plan of a small space.

python benchmarks/prediction/bench.py [--ranks 2 4] [--models GPT CNN] [--rounds 10] [--json FILE] [--show] [--memory]

As root on Linux, since the ranks go before other processes. Needs transformers. `--show` only prints the file;
`--memory` measures and prints nothing but the memory of ranks, for which the machine need not be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from dataclasses import astuple
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from common.machine import environment
from measuring import host, measure_model, measure_space
from models import MODELS

from penstock.distributed.launch.processes import launch
from report import show, show_memory


def run_rank(names: list[str], rounds: int, space: list[str], out: Path) -> None:
    """Runs in each process; rank 0 writes what was found after each model."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    runtime = host(rank, ranks)
    found: dict[str, Any] = {"host": astuple(runtime), "models": {}, "spaces": {}}
    for name in names:
        found["models"][name] = measure_model(name, rank, ranks, rounds, runtime)
    for name in space if ranks == 2 else ():
        found["spaces"][name] = measure_space(name, rank, ranks, rounds, runtime)
    if rank == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--space", nargs="*", choices=MODELS, default=["GPT"], help="whose small space to run")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--json", type=Path, default=Path("prediction.json"), help="what was measured, old and new")
    parser.add_argument("--memory", action="store_true", help="measure the memory of ranks alone; no rounds")
    parser.add_argument("--show", action="store_true", help="print what the file has, without running anything")
    parser.add_argument("--rank-file", type=Path, help=argparse.SUPPRESS)  # given to each process
    given = parser.parse_args()
    if given.rank_file:
        rounds, space = (0, []) if given.memory else (given.rounds, given.space)
        run_rank(given.models, rounds, space, given.rank_file)
        return
    if not given.show:
        found = json.loads(given.json.read_text()) if given.json.exists() else {}
        found["environment"] = environment(torch=torch.__version__, threads_per_rank=1)
        for ranks in given.ranks:
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "found.json"
                if status := launch([__file__, *sys.argv[1:], "--rank-file", str(out)], ranks, threads=1):
                    sys.exit(status)
                merge(found.setdefault(str(ranks), {}), json.loads(out.read_text()))
        given.json.write_text(json.dumps(found) + "\n")
    found = json.loads(given.json.read_text())
    if given.memory:
        show_memory(found)
    else:
        show(found)


def merge(old: dict[str, Any], new: dict[str, Any]) -> None:
    """What was measured now takes the place of what was known of it."""
    for key, value in new.items():
        if isinstance(value, dict):
            old.setdefault(key, {}).update(value)
        elif value is not None:
            old[key] = value


if __name__ == "__main__":
    main()
