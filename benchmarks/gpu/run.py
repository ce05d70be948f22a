"""Shows everything about Penstock that a single GPU can show: a process per case, a row per case.

    python benchmarks/gpu/run.py --part 2               # or `make gpu PART=2`; without a part, all of them
    python benchmarks/gpu/run.py --only 'verify/*/gpt/*/zb-*' --device cpu

Needs nothing but torch, numpy and, for one model, transformers. Installs nothing, and reaches no network. Rows go to
results.json as cases end, and replace those of the same name if they come from the same machine, versions and code.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import nccl_library  # noqa: E402 (found only now, and has to be in front of all that imports torch)

_given = argparse.ArgumentParser(add_help=False)
_given.add_argument("--device", default="cuda")
if __name__ == "__main__" and _given.parse_known_args()[0].device == "cuda":
    nccl_library.put_in_front()
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that what is imported here does not touch the device
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a process makes its first product

try:  # these are found and may be imported only after what is said above
    import running
    from cases import TABLE
    from cases.case import Case
    from cases.environment import FIRST
    from rows import BAD, DONE, Row, row
except ModuleNotFoundError as error:
    if error.name not in ("torch", "numpy"):
        raise
    sys.exit(f"{sys.executable} has no {error.name}; give a Python that has: make gpu PYTHON=/usr/bin/python3.12")
except KeyboardInterrupt:
    sys.exit(130)

MAX_SECONDS = 470.0
"""Of a part, which has to end in less than eight minutes."""


UNCOMPARED = {"commit", "date"}
"""What of an environment says when its rows were made, and not where."""


class Results:
    """The file of results, written whenever a case has ended: environments, and rows, whose code is that of one."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.environments: list[dict[str, Any]] = []
        self.rows: dict[str, Row] = {}

    def begin(self, environment: dict[str, Any], *, any_code: bool = False) -> str:
        """Goes on with the rows of earlier runs if the same code and versions made them on the same machine.

        Other results are moved to a file of their own. Returns what is to be said about that, or nothing. `any_code`:
        the code may be another; each row has its own.
        """
        self.environments = [environment]
        if not self._path.exists():
            return ""
        before = json.loads(self._path.read_text())
        then = before["environments"][-1]
        uncompared = UNCOMPARED | ({"code"} if any_code else set())
        names = sorted((then.keys() | environment.keys()) - uncompared)
        differs = [name for name in names if then.get(name) != environment.get(name)]
        if not differs:
            earlier = [each for each in before["environments"] if each["code"] != environment["code"]]
            self.environments = [*earlier, environment]
            self.rows = {row["name"]: row for row in before["rows"]}
            return ""
        numbered = (self._path.with_stem(f"{self._path.stem}-{number}") for number in itertools.count(1))
        aside = next(path for path in numbered if not path.exists())
        self._path.rename(aside)
        words = "; ".join(f"{name} was {then.get(name)}, is {environment.get(name)}" for name in differs)
        return f"earlier results, which are not of this machine and code, are now in {aside}: {words}"

    def add(self, row: Row) -> None:
        if row["status"] == "not run" and row["name"] in self.rows:
            return
        self.rows[row["name"]] = {**row, "code": self.environments[-1]["code"]}
        text = json.dumps({"environments": self.environments, "rows": list(self.rows.values())}, indent=1)
        part = self._path.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(self._path)


def counts(rows: Mapping[str, Row]) -> str:
    """The table of docs/guides/on-gpus.md: what became of the cases that there are, by part."""
    lines = []
    for part in sorted({case.part for case in TABLE.values()}):
        names = [case.name for case in TABLE.values() if case.part == part and case.name != FIRST]
        mine = [rows.get(name, {"status": "not run"}) for name in names]
        of = Counter(row["status"] for row in mine if row["status"] != "measured" or row.get("reached", True))
        missed, failed = len(mine) - of.total(), sum(of[status] for status in BAD)
        others = len(mine) - of["ok"] - of["measured"] - missed - failed
        lines.append(f"| {part} | {of['ok']} | {of['measured']} | {missed} | {failed} | {others} |")
    gone = len(rows.keys() - TABLE.keys())
    return "\n".join([*lines, f"{gone} more rows are of cases that are no longer run."])


def table(rows: Sequence[Row]) -> str:
    """A line for each row that is not ok or that measures; the others, which are many and alike, counted by kind."""
    lines, counted = [], Counter[tuple[str, str, str]]()
    for row in rows:
        kind = row["name"].rsplit("/", 2)[0] if row["name"].startswith("verify/") else row["name"].rpartition("/")[0]
        if row["status"] == "ok" and "/verify/" in f"/{row['name']}":
            counted["ok", kind, ""] += 1
        elif row["status"] in ("skipped", "not run"):
            counted[row["status"], kind, row["says"]] += 1
        else:
            lines.append(f"{row['status']:<10} {row['name']:<50} {row['says']}")
    lines += [f"{status:<10} {kind:<50} {number} cases {says}" for (status, kind, says), number in counted.items()]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    parts = sorted({case.part for case in TABLE.values()})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "standin"), default="cuda")
    parser.add_argument("--part", type=int, nargs="+", choices=parts, default=parts, help="in this order; default: all")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cases whose names match one of these")
    parser.add_argument("--missing", action="store_true", help="leave out what is ok in the file already")
    parser.add_argument("--any-code", action="store_true", help="go on with rows that other code has made")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    parser.add_argument("--counts", action="store_true", help="print how many cases of the file came out how")
    parser.add_argument("--jobs", type=int, help="cases at a time (default: as many as cores and memory allow)")
    parser.add_argument("--forks", action="store_true", help="start ranks without torchrun, which takes longer")
    parser.add_argument("--seconds", type=float, default=MAX_SECONDS, help="for each part (default: %(default)g)")
    parser.add_argument("--total", type=float, default=float("inf"), help="seconds for all parts (default: no limit)")
    parser.add_argument("--json", type=Path, default=HERE / "results.json")
    chosen = parser.parse_args(given)
    cases = [
        case
        for name, case in TABLE.items()
        if case.part in chosen.part and any(fnmatch.fnmatch(name, p) for p in chosen.only or ["*"])
    ]
    if chosen.list:
        print("\n".join(f"{case.part} {case.name}" for case in cases))
        return 0
    if chosen.counts:
        print(counts({row["name"]: row for row in json.loads(chosen.json.read_text())["rows"]}))
        return 0
    return _run(cases, chosen)


def _run(cases: Sequence[Case], chosen: argparse.Namespace) -> int:
    _import_what_cases_need()
    results, rows = Results(chosen.json), []

    def ended(row: Row) -> None:
        rows.append(row)
        results.add(row)
        print(f"{row['status']:<10} {row['seconds']:6.1f} s  {row['name']}: {row['says'][:200]}", flush=True)

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    first: list[Row] = []
    began = begun = time.monotonic()
    running.run([TABLE[FIRST]], chosen.device, 1, began + chosen.seconds, first.append)
    if first[0]["status"] != "ok":
        print(f"{first[0]['status']}: {first[0]['says']}", file=sys.stderr)
        return 2
    environment = {name: value for name, value in first[0]["found"].items() if name not in ("ok", "says")}
    moved = results.begin(environment, any_code=chosen.any_code)
    print(moved, end="\n" if moved else "")
    ended(first[0])
    known = {name for name, row in results.rows.items() if row["status"] in DONE} if chosen.missing else {FIRST}
    jobs = chosen.jobs or running.usual_jobs(environment)
    try:
        for part in dict.fromkeys(chosen.part):
            mine = [case for case in cases if case.part == part and case.name not in known]
            until = min(began + chosen.seconds, begun + chosen.total)
            go = partial(running.run, device=chosen.device, jobs=jobs, until=until, ended=ended, forks=chosen.forks)
            _run_in_turn(mine, results.rows, go)
            began = time.monotonic()
    finally:  # of an interrupted run, too
        counted = Counter(row["status"] for row in rows)
        counts = ", ".join(f"{number} {status}" for status, number in counted.items())
        print(f"\n{table(rows)}\n\n{counts}: {chosen.json}", flush=True)
    return 1 if any(counted[status] for status in (*BAD, "not run")) else 0


def _run_in_turn(cases: Sequence[Case], rows: Mapping[str, Row], go: partial[None]) -> None:
    """Runs cases, those that come after another once that is ok."""
    gates = {case.requires for case in cases if case.requires}
    missing = [TABLE[gate] for gate in gates if "environment" not in rows.get(gate, {}).get("found", {})]
    first = {case.name: case for case in cases if not case.requires} | {case.name: case for case in missing}
    go(list(first.values()))
    for gate in gates:
        behind, found = [case for case in cases if case.requires == gate], rows[gate]
        if found["status"] == "ok":
            go(behind, environment=found["found"]["environment"])
            continue
        for case in behind:
            status = "not run" if found["status"] == "not run" else "skipped"
            go.keywords["ended"](row(case, status, f"{gate}: {found['status']}: {found['says']}", 0.0))


def _import_what_cases_need() -> None:
    """Once, for all of them: none of this touches a device, as a library of somebody else's might."""
    import importlib

    for name in ("torch", "torch.distributed", "penstock.pipe.build", "penstock.proof.verify", "penstock.checkpoint"):
        importlib.import_module(name)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
