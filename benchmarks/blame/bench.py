"""Plants faults, one by one, in scripts that know nothing of Penstock, and asks `penstock blame` what is wrong.

python benchmarks/blame/bench.py [--only TEXT;TEXT] [--commands]

The ranks are forks of this process, which has imported torch and Penstock; with --commands each case is a real command.
Writes results.json and the table in README.md, unless --only is given.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from penstock.distributed.launch.rank import main as run_rank
from penstock.distributed.launch.target import load
from penstock.verification.blame.judge import judge
from penstock.verification.blame.names import read
from penstock.verification.blame.pipelining import begin
from penstock.verification.blame.watch import WATCH

HERE = Path(__file__).parent
RANKS = {"with_replicas.py": 4}


def cases() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((HERE / "cases.json").read_text())
    return found


@contextlib.contextmanager
def port() -> Iterator[int]:
    """A free one. Nobody else is given it before the end of the block, though a store may listen on it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def forked(run: Callable[[], None], environment: dict[str, str], output: Path) -> int:
    child = os.fork()
    if child:
        return child
    try:
        with output.open("a") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        os.environ.update(environment)
        run()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)


def in_forks(case: dict[str, Any]) -> dict[str, Any]:
    """The report of a case; `error` if there is none."""
    ranks = RANKS.get(case["script"], 2)
    with tempfile.TemporaryDirectory() as name, port() as number:
        folder, log = Path(name), Path(name, "log")
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(number), "WORLD_SIZE": str(ranks)}
        where |= {"PENSTOCK_BLAME": name, "PENSTOCK_BLAME_STEPS": "3", "CASE": case["options"], "FAULT": case["fault"]}

        def rank() -> None:
            sys.argv[:] = ["penstock.distributed.launch.rank", str(HERE / case["script"])]
            begin()
            try:
                run_rank()
            finally:
                WATCH[0].flush()

        ended = [forked(rank, where | {"RANK": str(r), "LOCAL_RANK": str(r)}, log) for r in range(ranks)]
        ok = [os.waitpid(child, 0)[1] for child in ended] == [0] * ranks
        report = folder / "report.json"

        def judged() -> None:
            sys.path.insert(0, str(HERE))

            given = load(f"{HERE / 'model.py'}:make")
            report.write_text(json.dumps(judge(read(folder, "" if ok else "failed"), given.model, given).to_dict()))

        os.waitpid(forked(judged, where, log), 0)
        if report.exists():
            found: dict[str, Any] = json.loads(report.read_text())
            return found
        return {"ok": False, "finding": None, "error": log.read_text()[-1500:]}


def by_command(case: dict[str, Any]) -> dict[str, Any]:
    ranks = str(RANKS.get(case["script"], 2))
    environment = {**os.environ, "CASE": case["options"], "FAULT": case["fault"]}
    with port() as number:
        command = ["torchrun", "--nproc-per-node", ranks, "--master-port", str(number), str(HERE / case["script"])]
        blame = [sys.executable, "-m", "penstock", "blame", f"{HERE / 'model.py'}:make", "--json", "--", *command]
        done = subprocess.run(blame, capture_output=True, text=True, env=environment, check=False)
    with contextlib.suppress(ValueError):
        found: dict[str, Any] = json.loads(done.stdout)
        return found
    return {"ok": False, "finding": None, "error": done.stderr[-1500:]}


def verdict(case: dict[str, Any], report: dict[str, Any]) -> str:
    """Whether a fault is named rightly: its kind, its action, and words that say what it is."""
    finding = report["finding"]
    if "error" in report:
        return "error"
    if not case["fault"]:
        return "right" if finding is None else "accused"
    if finding is None:
        return "not seen"
    is_named = (
        finding["kind"] == case["kind"] and finding["action"] == case["action"] and case["says"] in finding["text"]
    )
    return "named" if is_named else "named wrongly"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="parts of titles, separated by semicolons")
    parser.add_argument("--commands", action="store_true")
    given = parser.parse_args()
    rows = []
    for case in cases():
        title = f"{case['script']} {case['options'] or '-'} {case['fault'] or 'right'}"
        if not any(part in title for part in given.only.split(";")):
            continue
        report = (by_command if given.commands else in_forks)(case)
        row = case | {"verdict": verdict(case, report), "summary": report.get("summary", report.get("error", ""))}
        rows.append(row)
        print(f"{row['verdict']:14}{title}\n{' ' * 14}{row['summary']}", flush=True)
    for kinds in (True, False):
        of = [row["verdict"] for row in rows if bool(row["fault"]) == kinds]
        print({name: of.count(name) for name in sorted({*of})})
    if not given.only:
        (HERE / "results.json").write_text(json.dumps(rows, indent=1) + "\n")
        lines = ["| script | options | fault | verdict | penstock blame says |", "|---|---|---|---|---|"]
        for row in rows:
            cells = row["script"][5:-3], row["options"], row["fault"] or "none", row["verdict"], row["summary"]
            lines.append(f"| {' | '.join(cells)} |")
        readme, mark = HERE / "README.md", "<!-- table -->\n"
        readme.write_text(readme.read_text().split(mark)[0] + mark + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
