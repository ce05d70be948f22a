"""How `torch.distributed.pipelining` and Penstock handle the field's traps, side by side, on two gloo ranks.

Writes results.json, and the table between the marks in README.md; with `--rows tied masked`, some rows, and no file.
"""

from __future__ import annotations

import argparse
import datetime
import json
import multiprocessing
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
RANKS = 2
SECONDS = 30.0
"""A row's processes are ended after this long: they hang."""
MARKS = ("<!-- table -->", "<!-- end -->")
Side = Literal["torch", "penstock"]


def run_rank(folder: str, name: str, side: Side, rank: int) -> None:
    """Runs in each of two processes: writes what it found to the folder."""
    import torch
    import torch.distributed as dist
    from rows import TABLE

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=datetime.timedelta(seconds=2 * SECONDS)
    )
    try:
        found = getattr(TABLE[name], side)(rank)
    except Exception as error:
        words = " ".join(str(error).split())
        found = f"raises {type(error).__name__}: {words[:70]}{'...' if len(words) > 70 else ''}"
    Path(folder, f"rank-{rank}").write_text(json.dumps(found))
    os._exit(0)


def try_one(name: str, side: Side) -> str:
    """How one side handles one trap."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.pipelining", "penstock.pipe.build"])
    with tempfile.TemporaryDirectory() as folder:
        processes = [context.Process(target=run_rank, args=(folder, name, side, rank)) for rank in range(RANKS)]
        for process in processes:
            process.start()
        lasted = _wait(processes)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
            process.join()
        files = [Path(folder, f"rank-{rank}") for rank in range(RANKS)]
        found = [json.loads(file.read_text()) if file.exists() else None for file in files]
    told = [
        f"rank {rank} is ended after {s:.0f} s" for rank, s in lasted.items() if not found[rank] and rank not in hung
    ]
    raised = [f"rank {rank} {text}" for rank, text in enumerate(found) if text and text.startswith("raises")]
    stuck = [f"rank {rank} hangs ({SECONDS:.0f} s)" for rank in hung]
    if raised or stuck:
        return "; ".join(raised + stuck)
    return next((text for text in found if text), min(told, default="nothing", key=lambda text: lasted[int(text[5])]))


def _wait(processes: list[Any]) -> dict[int, float]:
    """How many seconds each process ran. Waits until all have ended or time is up."""
    began, lasted = time.monotonic(), {}
    while len(lasted) < len(processes) and time.monotonic() < began + SECONDS:
        for rank, process in enumerate(processes):
            if rank not in lasted and not process.is_alive():
                lasted[rank] = time.monotonic() - began
        time.sleep(0.05)
    return lasted


def measure(names: list[str]) -> list[dict[str, Any]]:
    from rows import TABLE

    found = []
    for name in names:
        row = TABLE[name]
        one: dict[str, Any] = {"name": name, "number": row.number, "trap": row.trap, "right": row.right}
        one |= {side: try_one(name, side) for side in ("torch", "penstock")}
        found.append(one)
        print(f"{row.number:2} {row.trap}\n   torch     {one['torch']}\n   penstock  {one['penstock']}", flush=True)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| trap | | right | torch | Penstock |", "|--:|---|---|---|---|"]
    lines += [
        f"| {row['number']} | {row['trap']} | {row['right']} | {row['torch'].replace('|', ' ')} | {row['penstock']} |"
        for row in rows
    ]
    return "\n".join(lines)


def write(rows: list[dict[str, Any]]) -> None:
    import torch

    import penstock

    versions = {"torch": torch.__version__, "penstock": penstock.__version__, "python": sys.version.split()[0]}
    (HERE / "results.json").write_text(json.dumps({"versions": versions, "rows": rows}, indent=2) + "\n")
    readme = (HERE / "README.md").read_text()
    before, after = readme.split(MARKS[0])[0], readme.split(MARKS[1])[1]
    (HERE / "README.md").write_text(f"{before}{MARKS[0]}\n\n{table(rows)}\n\n{MARKS[1]}{after}")


def main() -> None:
    from rows import TABLE

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", choices=list(TABLE))
    chosen = parser.parse_args()
    rows = measure(chosen.rows or list(TABLE))
    if not chosen.rows:
        write(rows)


if __name__ == "__main__":
    main()
