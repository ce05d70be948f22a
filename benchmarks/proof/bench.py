"""Which models that a pipeline would train wrongly the proof sees, and in which step; and which faults of a runtime.

Writes results.json, and the tables between the marks in README.md; with `--only` and `--kind`, these rows anew.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import apart  # noqa: E402
import judged  # noqa: E402
from models import CASES  # noqa: E402

AT_ONCE = 5
RESULTS = HERE / "results.json"


def judge(name: str, schedule: str) -> dict[str, Any]:
    """One row: the proof's word, and the truth."""
    case = CASES[name]
    row = {"name": name, "kind": case.kind, "schedule": schedule}
    (proof,) = apart.run([(judged.proved, (name, schedule))])
    if "error" in proof:
        how = "refused" if proof.get("ours") else "raises"
        return row | {"proof": how, "summary": proof["error"][:400], "truth": "", "seconds": proof.get("seconds")}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [(judged.piped, (name, schedule, rank, f"{folder}/store")) for rank in range(2)]
        plain, *found = apart.run([(judged.unsplit, (name,)), *ranks])
    true = judged.truth(found, plain, ties=case.ties or schedule == "dualpipe")
    return row | {"proof": proof["seen"], "summary": "" if proof["ok"] else proof["summary"], "truth": true}


def verdict(row: dict[str, Any]) -> str:
    """What a row comes to."""
    proof, true = row["proof"], row["truth"]
    if proof in ("refused", "raises"):
        return proof
    if proof == "exact":
        return "not seen" if true.startswith("wrong") else "exact" if true == "right" else "refused in processes"
    return "false alarm" if true == "right" else proof


def of_case(name: str) -> list[dict[str, Any]]:
    """A row for each schedule. What is refused under one is not tried under the others."""
    rows: list[dict[str, Any]] = []
    for schedule in CASES[name].schedules:
        row = judge(name, schedule)
        rows.append(row | {"verdict": verdict(row)})
        if rows[-1]["verdict"] == "refused":
            break
    return rows


def measure(names: list[str]) -> list[dict[str, Any]]:
    rows = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        done = as_completed([pool.submit(of_case, name) for name in names])
        for row in (row for each in done for row in each.result()):
            keep({"models": [row]})
            print(
                f"{row['name']:28} {row['schedule']:9} {row['verdict']:18} {(row['truth'] or row['summary'])[:90]}",
                flush=True,
            )
            rows.append(row)
    return rows


def plant(name: str) -> dict[str, Any]:
    """One fault's row."""
    (found,) = apart.run([(judged.planted, (name,))])
    found = {"seen": "raises", "named": False, "says": found["error"]} if "error" in found else found
    print(f"{name:44} {found['seen']:10} {found['named']!s:6} {found['says'][:120]}", flush=True)
    return {"name": name, "schedule": "", **found}


KINDS = ("refused", "step 1", "step 2", "step 3", "evaluation", "not seen", "exact", "false alarm")


def totals(rows: list[dict[str, Any]]) -> str:
    """How many of each kind came to what."""
    of = {kind: [row for row in rows if row["kind"] == kind] for kind in dict.fromkeys(row["kind"] for row in rows)}
    lines = [
        "| kind | classes | runs | refused | seen in step 1 | 2 | 3 | in evaluation | not seen | right | false alarms |"
    ]
    lines.append("|---|" + "--:|" * 10)
    for kind, some in {**of, "**all**": rows}.items():
        counts = Counter(row["verdict"] for row in some)
        refused = sum(counts[each] for each in ("refused", "refused in processes", "raises"))
        found = [refused, *(counts[f"seen in {when}"] for when in KINDS[1:5]), *(counts[each] for each in KINDS[5:])]
        cells = [kind, len({row["name"] for row in some}), len(some), *found]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def of_models(rows: list[dict[str, Any]]) -> str:
    lines = ["| class | kind | schedule | the proof | the truth |", "|---|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: (row["kind"], row["name"], row["schedule"])):
        true = row["truth"].replace("|", " ")
        true = true.split(":")[0] if not true.startswith(("wrong", "right")) else true
        lines.append(f"| {row['name']} | {row['kind']} | {row['schedule']} | {row['verdict']} | {true} |")
    return "\n".join(lines)


def of_faults(rows: list[dict[str, Any]]) -> str:
    import faults

    lines = ["| fault | the proof | names where | it says |", "|---|---|---|---|"]
    for row in sorted(rows, key=lambda row: list(faults.FAULTS).index(row["name"])):
        what = (faults.FAULTS[row["name"]].plant.__doc__ or "").rstrip(".")
        says = row["says"].split(" differs by ")[0].replace("|", " ")
        lines.append(f"| {what} | {row['seen']} | {'yes' if row['named'] else 'no'} | {says[:160]} |")
    return "\n".join(lines)


def write() -> None:
    """The tables of README.md."""
    found, readme = json.loads(RESULTS.read_text()), (HERE / "README.md").read_text()
    for mark, text in (
        ("totals", totals(found["models"])),
        ("faults", of_faults(found["faults"])),
        ("models", of_models(found["models"])),
    ):
        before, after = readme.split(f"<!-- {mark} -->")[0], readme.split(f"<!-- end of {mark} -->")[1]
        readme = f"{before}<!-- {mark} -->\n\n{text}\n\n<!-- end of {mark} -->{after}"
    (HERE / "README.md").write_text(readme)


def keep(found: dict[str, list[dict[str, Any]]]) -> None:
    """Puts rows in the place of those with the same name and schedule."""
    known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for table, rows in found.items():
        by_key = {(row["name"], row["schedule"]): row for row in (*known.get(table, ()), *rows)}
        known[table] = list(by_key.values())
    RESULTS.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+")
    parser.add_argument("--kind", nargs="+")
    parser.add_argument("--missing", action="store_true", help="those without a row")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--faults", action="store_true", help="only the faults")
    parser.add_argument("--tables", action="store_true", help="only writes the tables of README.md")
    chosen = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH", "")]))
    names = chosen.only or [n for n, case in CASES.items() if not chosen.kind or case.kind in chosen.kind]
    if chosen.missing:
        known = {row["name"] for row in json.loads(RESULTS.read_text())["models"]}
        names = [name for name in names if name not in known]
    if chosen.tables:
        write()
        return
    began = time.monotonic()
    if chosen.faults or not (chosen.only or chosen.kind or chosen.missing):
        import faults

        with ThreadPoolExecutor(AT_ONCE) as pool:
            keep({"faults": list(pool.map(plant, faults.FAULTS))})
    rows = [] if chosen.faults else measure(names)
    if chosen.verbose:
        for row in rows:
            print("--", row["name"], row["schedule"], "|", row["summary"], "|", row["truth"])
    print(Counter(row["verdict"] for row in rows), f"{time.monotonic() - began:.0f} s")
    write()


if __name__ == "__main__":
    main()
