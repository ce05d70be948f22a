"""How long the studio's page takes from a slider's move to the new numbers, in Chromium.

python benchmarks/studio/updates.py
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

from penstock.studio.serve import bind

MOVES = 30
SIZES = ((2, 4), (4, 8), (4, 16), (8, 16), (8, 32), (16, 32))
MEASURE = """
async ([name, values]) => {
  const table = document.querySelector(".figures-table");
  const input = document.getElementById(`in-${name}`);
  const took = [];
  for (const value of values) {
    const begun = performance.now();
    const changed = new Promise((done) => new MutationObserver((_, one) => { one.disconnect(); done(); })
      .observe(table, { childList: true }));
    input.value = value;
    input.dispatchEvent(new Event("input"));
    await changed;
    await new Promise(requestAnimationFrame);  // drawn
    took.push(performance.now() - begun);
    await new Promise((done) => setTimeout(done, 50));
  }
  return took;
}
"""


def main() -> None:
    server = bind("127.0.0.1", 0, Path(tempfile.mkdtemp()))
    made = server.made()
    thread = threading.Thread(target=made.run, kwargs={"sockets": [server.socket]})
    thread.start()
    while not made.started:
        time.sleep(0.01)
    with sync_playwright() as playwright:
        flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=flags)
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        print(f"{'ranks':>5} {'microbatches':>12}  {'median':>8} {'p90':>8} {'worst':>8}   four schedules, ms")
        for ranks, microbatches in SIZES:
            page.goto("about:blank")
            page.goto(f"{server.link}#ranks={ranks}&microbatches={microbatches}")
            page.wait_for_selector("tr[data-schedule=zb-h1]")
            values = [round(0.5 + 0.1 * move, 2) for move in range(1, MOVES + 1)]
            took = sorted(page.evaluate(MEASURE, ["forward", values]))
            p90 = took[round(0.9 * (len(took) - 1))]
            print(f"{ranks:>5} {microbatches:>12}  {statistics.median(took):8.1f} {p90:8.1f} {took[-1]:8.1f}")
            sys.stdout.flush()
        browser.close()
    made.should_exit = True
    thread.join()


if __name__ == "__main__":
    main()
