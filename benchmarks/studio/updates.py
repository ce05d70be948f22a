"""How long the studio's page takes from a slider's move to the new numbers, in Chromium.

    python benchmarks/studio/updates.py [--json FILE]

For each size, with the four schedules that are chosen at first and with all there are: single moves of F, each timed
from its event to the frame with the new figures, and the part of it that is the server's answer; then a drag, an event
every 16 ms for two seconds: how often the numbers changed, and how long after the last event the last of them stood.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from penstock.report.studio.app import bind
from penstock.schedule import schedule_specs

MOVES = 20
SIZES = ((4, 8), (8, 32), (16, 32))
CHOSEN = {"4": "naive,gpipe,1f1b,zb-h1", "all": ",".join(one.name for one in schedule_specs())}
SINGLE = """
async ([name, values]) => {
  const table = document.querySelector(".figures-table");
  const input = document.getElementById(`in-${name}`);
  const found = [];
  for (const value of values) {
    performance.clearResourceTimings();
    const begun = performance.now();
    const changed = new Promise((done) => new MutationObserver((_, one) => { one.disconnect(); done(); })
      .observe(table, { childList: true }));
    input.value = value;
    input.dispatchEvent(new Event("input"));
    await changed;
    await new Promise(requestAnimationFrame);  // drawn
    const took = performance.now() - begun;
    const answer = performance.getEntriesByType("resource").reduce((sum, one) => sum + one.duration, 0);
    found.push([took, answer]);
    await new Promise((done) => setTimeout(done, 50));
  }
  return found;
}
"""
DRAG = """
async ([name, values]) => {
  const table = document.querySelector(".figures-table");
  const input = document.getElementById(`in-${name}`);
  const at = [];
  const seen = new MutationObserver(() => at.push(performance.now()));
  seen.observe(table, { childList: true });
  for (const value of values) {
    input.value = value;
    input.dispatchEvent(new Event("input"));
    await new Promise((done) => setTimeout(done, 16));
  }
  const last = performance.now();
  for (let quiet = 0; quiet < 30; quiet += 1) {
    const before = at.length;
    await new Promise((done) => setTimeout(done, 20));
    if (at.length > before) quiet = 0;
  }
  return [at.length, at.length ? at[at.length - 1] - last : NaN];
}
"""


def measured(page: Any, link: str, ranks: int, microbatches: int, names: str) -> dict[str, float]:
    """Milliseconds, and updates a second, for one size."""
    page.goto("about:blank")
    page.goto(f"{link}#ranks={ranks}&microbatches={microbatches}&schedules={names}")
    page.wait_for_selector("tr[data-schedule='1f1b']")
    page.wait_for_timeout(500)
    moves = page.evaluate(SINGLE, ["forward", [round(0.5 + 0.1 * move, 2) for move in range(1, MOVES + 1)]])
    took, answer = (sorted(each) for each in zip(*moves, strict=True))
    updates, behind = page.evaluate(DRAG, ["forward", [round(0.5 + 0.02 * move, 2) for move in range(1, 126)]])
    return {
        "median": statistics.median(took), "p90": took[round(0.9 * (len(took) - 1))], "worst": took[-1],
        "answer": statistics.median(answer), "updates a second": updates / 2.0, "behind": behind,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path)
    file = parser.parse_args().json
    server = bind("127.0.0.1", 0, Path(tempfile.mkdtemp()))
    made = server.build()
    thread = threading.Thread(target=made.run, kwargs={"sockets": [server.socket]})
    thread.start()
    while not made.started:
        time.sleep(0.01)
    rows = []
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        for ranks, microbatches in SIZES:
            for chosen, names in CHOSEN.items():
                found = measured(page, server.link, ranks, microbatches, names)
                if not rows:
                    print("ranks microbatches schedules", *found, sep="  ")
                print(ranks, microbatches, chosen, *(f"{value:.0f}" for value in found.values()), sep="  ")
                sys.stdout.flush()
                rows.append({"ranks": ranks, "microbatches": microbatches, "schedules": chosen, **found})
        browser.close()
    made.should_exit = True
    thread.join()
    if file is not None:
        file.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
