"""How close the emulation's all-reduce comes to its model, to the engine's own, and to a loop that does nothing else.

    sudo python benchmarks/fabric/allreduce.py             # about half an hour; wants an idle machine
    sudo python benchmarks/fabric/allreduce.py --long      # also 10,000 trials of the preset mlp, for memory

Every figure comes from the command `penstock fabric`, one run per size, so that each has its own processor load. If
the processors were the limit, the figure is marked, and left out of fits and verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "runtime"))

import torch
import torch.distributed as dist
from bench import quartiles
from common.machine import environment, noting_others, others_share
from rich.console import Console
from rich.table import Table

from penstock.distributed.launch.processes import launch
from penstock.network.fabric.algorithms import closed_form
from penstock.network.fabric.alpha_beta import MIN_SIZES, LinkFit, fit, predict
from penstock.network.quantities import size_text

COLLECTIVE, ALGORITHM = "all_reduce", "ring"
FEW, MANY = 2, 4
"""The number of hosts to fit, and the number to predict."""
LOOPBACK_SIZES = (1 << 20, 4 << 20)
WITHIN, PREDICTED_WITHIN, OVERHEAD, GROWTH = 0.10, 0.15, 0.05, 0.05
"""The targets."""

PENSTOCK = [sys.executable, "-m", "penstock"]
Found = dict[str, Any]


def emulated(folder: Path, *arguments: str) -> Found:
    """The results of a run of `penstock fabric`."""
    command = [*PENSTOCK, "fabric", *arguments, "--out", str(folder), "--json"]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: Found = json.loads(done.stdout)
    return found


# -- shaped links -----------------------------------------------------------------------------------------------------


def of_size(where: Path, link: str, hosts: int, algorithm: str, size: int, trials: int) -> Found:
    """The median time for a size, and the load on the processors meanwhile."""
    folder = where / f"{link}-{hosts}-{algorithm}-{size}"
    many = ("--hosts", str(hosts), "--trials", str(trials), "--link", link)
    found = emulated(folder, "--sizes", str(size), "--algorithm", algorithm, *many)
    times = found["transfers"][0]["time_s"]
    return {"bytes": size, "median_s": times["p50"], "min_s": times["min"], **share(found)}


def share(found: Found) -> Found:
    return {"processors_busy": round(found["cpu"]["utilization"] or 0.0, 3), "saturated": found["cpu"]["saturated"]}


def fitted(rows: Sequence[Found], hosts: int) -> LinkFit | None:
    """A fit to the sizes at which the processors were not the limit; None if they are too few to test it."""
    terms = closed_form(COLLECTIVE, ALGORITHM, hosts)
    points = [(row["bytes"], row["median_s"], terms) for row in rows if not row["saturated"]]
    return fit(points) if len(points) >= MIN_SIZES else None


def against(rows: Sequence[Found], link: LinkFit | None, name: str) -> None:
    """Adds the model's prediction for `MANY` hosts, and the ratio of the measured time to it."""
    for row in rows:
        model = None if link is None else predict(link, COLLECTIVE, ALGORITHM, MANY, row["bytes"])
        row[f"{name}_s"] = model
        row[f"{name}_ratio"] = None if model is None or row["saturated"] else row["median_s"] / model


def of_link(where: Path, link: str, sizes: Sequence[int], trials: int) -> Found:
    """Measures our all-reduce on four hosts and on two, and the engine's own; sizes take turns."""
    ours, few, engine = [], [], []
    for size in sizes:
        ours.append(of_size(where, link, MANY, ALGORITHM, size, trials))
        few.append(of_size(where, link, FEW, ALGORITHM, size, trials))
        engine.append(of_size(where, link, MANY, "engine", size, trials))
    of_many, of_few = fitted(ours, MANY), fitted(few, FEW)
    against(ours, of_many, "model")
    against(ours, of_few, "predicted")
    for mine, other in zip(ours, engine, strict=True):
        counts = not mine["saturated"] and not other["saturated"]
        mine["over_engine"] = mine["median_s"] / other["median_s"] if counts else None
    return {
        "link": link,
        "trials": trials,
        "fit_4_hosts": of_many and asdict(of_many),
        "fit_2_hosts": of_few and asdict(of_few),
        "ring_4_hosts": ours,
        "ring_2_hosts": few,
        "engine_4_hosts": engine,
    }


# -- the price of measuring -------------------------------------------------------------------------------------------


def bare(size: int, trials: int, out: Path) -> None:
    """Runs in each process of the bare loop, with which the emulation's time is compared."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    data, taken = torch.ones(size // 4), []
    for number in range(-3, trials):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(data)
        if number >= 0:
            taken.append(time.perf_counter() - start)
        data.fill_(1)
    slowest = torch.tensor(taken, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(float(slowest.median())))
    dist.barrier()
    dist.destroy_process_group()


def overhead(where: Path, size: int, trials: int, repetitions: int) -> Found:
    """The engine's all-reduce on loopback, timed by `penstock fabric` and by a bare loop, which alternate."""
    ours, theirs, busy = [], [], []
    for number in range(repetitions):
        for turn in (number, number + 1):
            folder = where / f"loopback-{size}-{number}-{turn % 2}"
            if turn % 2:
                what = ("--sizes", str(size), "--algorithm", "engine", "--hosts", str(FEW), "--trials", str(trials))
                found = emulated(folder, *what)
                ours.append(found["transfers"][0]["time_s"]["p50"])
                busy.append(share(found))
            else:
                out = folder.with_suffix(".json")
                if launch([__file__, "--bare", str(size), str(trials), str(out)], FEW, threads=1):
                    sys.exit(1)
                theirs.append(json.loads(out.read_text()))
    return {
        "bytes": size,
        "penstock_milliseconds": quartiles([1000 * seconds for seconds in ours]),
        "bare_milliseconds": quartiles([1000 * seconds for seconds in theirs]),
        "ratio_by_repetition": quartiles([a / b for a, b in zip(ours, theirs, strict=True)]),
        "ratio_of_medians": statistics.median(ours) / statistics.median(theirs),
        "processors": busy,
    }


# -- memory over many trials ------------------------------------------------------------------------------------------


def memory(where: Path, trials: int) -> Found:
    """Resident bytes of each host's process, a tenth of the way through the preset on loopback and at its end."""
    folder = where / "long"
    command = [*PENSTOCK, "fabric", "--preset", "mlp", "--hosts", str(MANY), "--trials", str(trials)]
    seen: list[tuple[int, dict[int, int]]] = []
    with subprocess.Popen([*command, "--out", str(folder), "--json"], stdout=subprocess.PIPE, text=True) as running:
        while running.poll() is None and last_trial(folder) < trials - 1:
            done, resident = last_trial(folder), dict(host_memory(folder))
            if len(resident) == MANY and done >= trials // 10:
                seen = [*seen[:1], (done, resident)]
            time.sleep(0.1)
        found = json.loads(running.communicate()[0])
    if len(seen) < 2:
        sys.exit("the run was too short to be looked at twice: give more --long-trials")
    lines = sum(1 for _ in (folder / "samples.csv").open()) - 1
    (early, before), (late, after) = seen
    return {
        "trials": trials,
        "samples": lines,
        "samples_expected": trials * MANY * len(found["transfers"]),
        "at_trials": [early, late],
        "resident_bytes": [[before[rank], after[rank]] for rank in sorted(after)],
        "growth": max(after[rank] / before[rank] - 1 for rank in after),
    }


def last_trial(folder: Path) -> int:
    """The number of the last trial in the file; -1 before the first."""
    try:
        with (folder / "samples.csv").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 200, 0))
            number = file.read().rsplit(b"\n", 2)[-2].split(b",")[0]
    except (OSError, IndexError):
        return -1
    return int(number) if number.isdigit() else -1


def host_memory(folder: Path) -> Iterator[tuple[int, int]]:
    """The rank and resident bytes of each process that torchrun started for the run."""
    for process in Path("/proc").iterdir():
        try:
            if not process.name.isdigit() or str(folder).encode() not in (process / "cmdline").read_bytes():
                continue
            variables = dict(
                part.split(b"=", 1) for part in (process / "environ").read_bytes().split(b"\0") if b"=" in part
            )
            status = (process / "status").read_text()
        except OSError:  # it has ended
            continue
        if b"LOCAL_RANK" in variables and "VmRSS:" in status:
            yield int(variables[b"RANK"]), 1024 * int(status.partition("VmRSS:")[2].split()[0])


# -- what is shown ----------------------------------------------------------------------------------------------------


def show_link(found: Found, console: Console) -> None:
    table = Table(title=f"ring all-reduce, 4 hosts, {found['link']}: medians of {found['trials']} trials")
    heads = ("size", "ms", "model ms", "ratio", "from 2 hosts ms", "ratio", "engine ms", "ours/engine", "busy")
    for column in heads:
        table.add_column(column, justify="right")
    for mine, other in zip(found["ring_4_hosts"], found["engine_4_hosts"], strict=True):
        busy = f"{mine['processors_busy']:.0%}" + (" the limit" if mine["saturated"] else "")
        times = (mine["median_s"], mine["model_s"], mine["predicted_s"], other["median_s"])
        ms = ["" if one is None else f"{1000 * one:.2f}" for one in times]
        ratios = (mine["model_ratio"], mine["predicted_ratio"], mine["over_engine"])
        of = ["left out" if one is None else f"{one:.3f}" for one in ratios]
        table.add_row(size_text(mine["bytes"]), ms[0], ms[1], of[0], ms[2], of[1], ms[3], of[2], busy)
    console.print(table)
    for name in ("fit_4_hosts", "fit_2_hosts"):
        if link := found[name]:
            rate = f"{8e-6 * link['bytes_per_second']:,.4g} Mbit/s" if link["bytes_per_second"] else "no limit"
            console.print(f"{name}: alpha {1e6 * link['alpha_seconds']:.0f} us a step, 1/beta {rate}")
    for key, limit, what in (
        ("model_ratio", WITHIN, "the closed form, fitted"),
        ("predicted_ratio", PREDICTED_WITHIN, "the prediction from 2 hosts"),
    ):
        off = [abs(row[key] - 1) for row in found["ring_4_hosts"] if row[key] is not None]
        claim = f"{found['link']}: within {limit:.0%} of {what}"
        if not off:
            console.print(f"left out     {claim}: at too few sizes the processors were not the limit")
            continue
        verdict(max(off) <= limit, claim, console)
        of = len(found["ring_4_hosts"])
        console.print(f"             at most {max(off):.1%} off, {len(off)} of {of} sizes count")


def verdict(reached: bool, text: str, console: Console) -> None:
    console.print(f"{'reached    ' if reached else 'NOT reached'}  {text}")


def show(results: Found, console: Console) -> None:
    for found in results["links"]:
        show_link(found, console)
    for found in results["overhead"]:
        low, _, high = found["ratio_by_repetition"]
        ratio = f"{found['ratio_of_medians']:.3f} times a bare loop's (quartiles by repetition {low:.3f}, {high:.3f})"
        reached = found["ratio_of_medians"] <= 1 + OVERHEAD
        verdict(reached, f"{size_text(found['bytes'])} on loopback: {ratio}", console)
    if found := results.get("memory"):
        a, b = found["at_trials"]
        whole = found["samples"] == found["samples_expected"]
        verdict(
            found["growth"] <= GROWTH and whole, f"memory from trial {a:,} to {b:,}: {found['growth']:+.1%}", console
        )
    console.print(others_share(results["environment"]))


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="*", default=["100mbit", "1gbit"])
    parser.add_argument("--largest", type=int, default=8 << 20, help="bytes; sizes are doubled from 64 KiB on")
    parser.add_argument("--trials", type=int, default=30, help="of each size; 6 or more")
    parser.add_argument("--repetitions", type=int, default=8, help="of each side of the overhead")
    parser.add_argument("--loopback-trials", type=int, default=300, help="of each repetition")
    parser.add_argument("--long", action="store_true", help="also look at the memory of many trials")
    parser.add_argument("--long-trials", type=int, default=10_000)
    parser.add_argument("--json", type=Path, default=Path(__file__).with_name("results.json"))
    parser.add_argument("--bare", nargs=3, help=argparse.SUPPRESS)  # given to processes
    chosen = parser.parse_args(argv)
    if chosen.bare:
        bare(int(chosen.bare[0]), int(chosen.bare[1]), Path(chosen.bare[2]))
        return
    results: Found = {"environment": environment()}
    sizes = [64 << 10 << power for power in range(30) if 64 << 10 << power <= chosen.largest]
    with noting_others(results["environment"]), tempfile.TemporaryDirectory() as name:
        where = Path(name)
        results["links"] = [of_link(where, link, sizes, chosen.trials) for link in chosen.links]
        results["overhead"] = [
            overhead(where, size, chosen.loopback_trials, chosen.repetitions) for size in LOOPBACK_SIZES
        ]
        if chosen.long:
            results["memory"] = memory(where, chosen.long_trials)
    chosen.json.write_text(json.dumps(results, indent=2) + "\n")
    show(results, Console(width=None if os.isatty(1) else 120))


if __name__ == "__main__":
    main(sys.argv[1:])
