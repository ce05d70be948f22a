"""Shows everything about Penstock that a single GPU can show: a process per case, a row per case.

    python benchmarks/gpu/run.py --part 2               # or `make gpu PART=2`; without a part, all of them
    python benchmarks/gpu/run.py --only 'verify/*/gpt/*/zb-*' --device cpu

Without --part and --only it runs what results-h100.json has not shown, the most telling first. Says at the start what
the machine lacks. Installs nothing, and reaches no network. Rows go to results.json as cases end, and replace those of
the same name if they come from the same machine, versions and code.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import fnmatch
import itertools
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "src")]

import nccl_library  # noqa: E402 (found only now, and has to be in front of all that imports torch)
import needs  # noqa: E402

BEGAN = float(os.environ.setdefault("PENSTOCK_GPU_BEGAN", str(time.monotonic())))
"""When this process did, also if it has started again since."""

_early = argparse.ArgumentParser(add_help=False)
_early.add_argument("--device", default="cuda")
for _option in ("--list", "--counts"):
    _early.add_argument(_option, dest="looks", action="store_true")
_given = _early.parse_known_args()[0]
_puts_in_front = __name__ == "__main__" and _given.device == "cuda" and not _given.looks
_refused = nccl_library.put_in_front() if _puts_in_front else ""
del os.environ["PENSTOCK_GPU_BEGAN"]
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # so that what is imported here does not touch the device
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when a process makes its first product

try:  # these are found and may be imported only after what is said above
    LACKS = needs.lacks(_given.device, _refused)
    if _missing := ", ".join(lack.says for lack in LACKS if lack.cases == needs.ALL and lack.is_vital):
        sys.exit(f"{sys.executable} lacks {_missing}; give another: make gpu PYTHON=/usr/bin/python3.12")
    import running
    from cases import TABLE
    from cases.case import Case
    from cases.environment import FIRST
    from rows import BAD, DONE, UNFINISHED, Row, row
except KeyboardInterrupt:
    sys.exit(130)

MAX_SECONDS = 470.0
"""Of a run, from its process's start to its end: less than eight minutes."""

END_SECONDS = 5.0
"""What is left of them for the end: to say where threads are, and to kill processes."""

SHOWN = HERE / "results-h100.json"

TELLING = (
    *("ranks/4/verify/dualpipe", "ranks/4/verify/chimera", "ranks/*/messages of 16 MiB/*", "ranks/2/waits/*"),
    *("ranks/*", "figures/copies*", "figures/*torch*", "figures/*", "verify/2 processes/*", "*"),
)
"""What to show first of what is open."""

UNCOMPARED = {"commit", "date"}
"""What of an environment says when its rows were made, and not where."""


class RefusedError(Exception):
    """What is wrong with what was given, in a sentence."""


def read(path: Path) -> tuple[list[dict[str, Any]], dict[str, Row]]:
    """The environments, and the rows by name, of a file of results. Raises RefusedError if it is none."""
    try:
        found = json.loads(path.read_text())
        environments, rows = found["environments"], {row["name"]: row for row in found["rows"]}
        if not (environments[-1]["code"] and all(row["status"] for row in rows.values())):
            raise ValueError("it does not say what became of a case, or of which code it is")
        return environments, rows
    except OSError as error:
        raise RefusedError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError) as error:
        raise RefusedError(f"{path} is no file of results") from error


def locked(path: Path) -> IO[str]:
    """Keeps other runs from writing that file of results until this process ends. Raises RefusedError if one does."""
    try:
        file = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise RefusedError(f"{path} cannot be written: {error.strerror}") from error
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # not `flock`, which what it forks would hold, too
    except OSError as error:
        raise RefusedError(f"another run is writing {path}; wait for its end, or give another file: --json") from error
    return file


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
        try:
            environments, rows = read(self._path)
        except RefusedError as reason:
            return f"{reason}; it is now {self._move_aside()}"
        then = environments[-1]
        uncompared = UNCOMPARED | ({"code"} if any_code else set())
        names = sorted((then.keys() | environment.keys()) - uncompared)
        differs = [name for name in names if then.get(name) != environment.get(name)]
        if not differs:
            earlier = [each for each in environments if each["code"] != environment["code"]]
            self.environments = [*earlier, environment]
            self.rows = rows
            return ""
        words = "; ".join(f"{name} was {then.get(name)}, is {environment.get(name)}" for name in differs)
        return f"earlier results, which are not of this machine and code, are now in {self._move_aside()}: {words}"

    def _move_aside(self) -> Path:
        numbered = (self._path.with_stem(f"{self._path.stem}-{number}") for number in itertools.count(1))
        return self._path.rename(next(path for path in numbered if not path.exists()))

    def add(self, row: Row) -> None:
        before = self.rows.get(row["name"], row)["status"]
        if row["status"] in UNFINISHED and before not in UNFINISHED:
            return
        environment = self.environments[-1]
        self.rows[row["name"]] = {**row, "code": environment["code"], "device": device_of(environment)}
        text = json.dumps({"environments": self.environments, "rows": list(self.rows.values())}, indent=1)
        part = self._path.with_suffix(".part")
        part.write_text(text + "\n")
        part.replace(self._path)


def device_of(environment: Mapping[str, Any]) -> str:
    """The GPU's name, or what stood in for one."""
    return str(environment.get("gpu") or environment["device"])


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
            counted[row["status"], row["name"].partition("/")[0], row["says"]] += 1
        else:
            lines.append(f"{row['status']:<10} {row['name']:<50} {row['says']}")
    lines += [f"{status:<10} {kind:<50} {number} cases {says}" for (status, kind, says), number in counted.items()]
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> int:
    parts = sorted({case.part for case in TABLE.values()})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu", "standin"), default="cuda")
    parser.add_argument("--part", type=int, nargs="+", choices=parts, help="in this order")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cases whose names match one of these")
    parser.add_argument("--open", action="store_true", help="of these, what results-h100.json has not shown")
    parser.add_argument("--missing", action="store_true", help="leave out what is ok in the file already")
    parser.add_argument("--any-code", action="store_true", help="go on with rows that other code has made")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and run none")
    parser.add_argument("--counts", action="store_true", help="print how many cases of the file came out how")
    parser.add_argument("--jobs", type=int, help="cases at a time (default: as many as cores and memory allow)")
    parser.add_argument("--forks", action="store_true", help="start ranks without torchrun, which takes longer")
    parser.add_argument("--total", type=float, default=MAX_SECONDS, help="seconds of the run (default: %(default)g)")
    parser.add_argument("--json", type=Path, help="file of results (default: results.json; of a rehearsal, another)")
    chosen = parser.parse_args(given)
    chosen.json = chosen.json or HERE / ("results.json" if chosen.device == "cuda" else f"results-{chosen.device}.json")
    if chosen.counts:
        print(counts(read(chosen.json)[1]))
        return 0
    cases = choose(chosen)
    if chosen.list:
        print("\n".join(f"{case.part} {case.name}" for case in cases))
        return 0
    return _run(cases, chosen)


def choose(chosen: argparse.Namespace) -> list[Case]:
    """The cases in the order in which they run. Raises RefusedError if a pattern, or all together, means none."""
    for pattern in chosen.only or ():
        if not fnmatch.filter(TABLE, pattern):
            near = " or ".join(map(repr, difflib.get_close_matches(pattern, TABLE, 3, 0.4)))
            raise RefusedError(f"no case is called {pattern!r}{near and f'; did you mean {near}?'} --list names them")
    parts = chosen.part or sorted({case.part for case in TABLE.values()})
    names = [name for name in TABLE if any(fnmatch.fnmatch(name, pattern) for pattern in chosen.only or ["*"])]
    cases = [TABLE[name] for part in dict.fromkeys(parts) for name in names if TABLE[name].part == part]
    if chosen.open or not (chosen.part or chosen.only):
        shown = {name for name, row in read(SHOWN)[1].items() if row["status"] in DONE} | {FIRST}
        cases = [case for case in cases if case.name not in shown]
        cases.sort(key=lambda case: [fnmatch.fnmatch(case.name, pattern) for pattern in TELLING].index(True))
    if not cases:
        why = "--part and --only have none in common" if chosen.part and chosen.only else "all have been shown"
        raise RefusedError(f"no case is chosen: {why}")
    return cases


def _run(cases: Sequence[Case], chosen: argparse.Namespace) -> int:
    _import_what_cases_need()
    lock = locked(chosen.json)
    results, rows = Results(chosen.json), []

    def note(row: Row) -> None:
        rows.append(row)
        results.add(row)

    def ended(row: Row) -> None:
        note(row)
        print(f"{row['status']:<10} {row['seconds']:6.1f} s  {row['name']}: {row['says'][:200]}", flush=True)

    def end(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, end)
    first: list[Row] = []
    until = BEGAN + chosen.total - END_SECONDS
    running.run([TABLE[FIRST]], chosen.device, 1, until, first.append)
    if first[0]["status"] != "ok":
        print(f"{first[0]['status']}: {first[0]['says']}", file=sys.stderr)
        return 2
    environment = {name: value for name, value in first[0]["found"].items() if name not in ("ok", "says")}
    moved = results.begin(environment, any_code=chosen.any_code)
    print(moved, end="\n" if moved else "")
    ended(first[0])
    known = {name for name, row in results.rows.items() if row["status"] in DONE} if chosen.missing else {FIRST}
    cases = [case for case in cases if case.name not in known]
    jobs = chosen.jobs or running.usual_jobs(environment)
    go = partial(running.run, device=chosen.device, jobs=jobs, until=until, ended=ended, forks=chosen.forks)
    try:
        for _, part in itertools.groupby(_able(cases, note), lambda case: case.part):
            _run_in_turn(list(part), results.rows, go)
    finally:  # of an interrupted run, too
        counted = Counter(row["status"] for row in rows)
        counts = ", ".join(f"{number} {status}" for status, number in counted.items())
        print(f"\n{table(rows)}\n\n{counts} on {device_of(environment)}: {chosen.json}", flush=True)
        lock.close()
    is_empty = bool(cases) and all(row["status"] == "skipped" for row in rows[1:])
    if is_empty:
        print("nothing was shown: all that was chosen was skipped", file=sys.stderr)
    return 1 if is_empty or any(counted[status] for status in (*BAD, *UNFINISHED)) else 0


def _able(cases: Sequence[Case], note: Callable[[Row], None]) -> list[Case]:
    """Those that this machine has everything for. Says what it lacks for others, which are skipped."""
    able = list(cases)
    for lack in LACKS:
        theirs = [case for case in able if fnmatch.fnmatch(case.name, lack.cases)]
        if theirs:
            what = "are skipped" if lack.is_vital else "may fail"
            print(f"{len(theirs)} cases ({lack.cases}) {what}: {lack.says}", flush=True)
        for case in theirs if lack.is_vital else ():
            note(row(case, "skipped", lack.says, 0.0))
            able.remove(case)
    return able


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
            status = "not run" if found["status"] in UNFINISHED else "skipped"
            go.keywords["ended"](row(case, status, f"{gate}: {found['status']}: {found['says']}", 0.0))


def _import_what_cases_need() -> None:
    """Once, for all of them: none of this touches a device, as a library of somebody else's might."""
    import importlib

    ours = "penstock.pipe.build", "penstock.verification.verify", "penstock.checkpoint"
    for name in ("torch", "torch.distributed", *ours):
        importlib.import_module(name)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except RefusedError as reason:
        print(reason, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
