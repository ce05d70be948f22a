"""How fast a report's timeline pans and zooms in Chromium: the time from one frame to the next, and of drawing one.

    python benchmarks/report/frames.py [--actions 100000] [--ranks 16]

The page is one that `penstock report` could write: a simulated schedule of so many actions, with memory under each
rank and its critical path. A frame of 30 a second may take 33 ms. The browser draws without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from penstock.report.frame import frame
from penstock.report.web.page import asset, bundle, embedded
from penstock.report.web.screenshot import browser
from penstock.report.web.timeline_data import band, curve, timeline_data
from penstock.schedule import generate
from penstock.simulate import LinkCost, StageCost, memory, simulate

FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")
FRAMES = 120
MOVES = {
    "pan, half in sight": "view.setRange(view.extent * at / frames / 2, view.extent * (at / frames + 1) / 2)",
    "pan, a hundredth": "view.setRange(view.extent * at / frames, view.extent * (at / frames + 0.01))",
    "pan, a few boxes a rank": "view.setRange(view.extent * at / frames, view.extent * (at / frames + 0.001))",
    "zoom in": "view.setRange(view.extent * 0.3, view.extent * (0.3 + 0.7 * 0.93 ** at))",
}
MEASURE = """async ([move, frames]) => {
    const step = new Function("view", "at", "frames", move);
    const gaps = [], drawn = [];
    let last = await new Promise(requestAnimationFrame);
    for (let at = 0; at < frames; at += 1) {
        step(view, at, frames);
        const now = await new Promise(requestAnimationFrame);
        await new Promise((done) => setTimeout(done));
        gaps.push(now - last);
        drawn.push(view.drawn);
        last = now;
    }
    return [gaps.slice(2), drawn.slice(2)];
}"""


def write(path: Path, ranks: int, actions: int) -> int:
    """A page of about so many actions; returns how many."""
    schedule = generate("zb-h1", ranks, max(ranks, actions // (3 * ranks)))
    costs = [StageCost(1e-3, 1e-3, 1e-3, activation_bytes=1e8, weight_gradient_bytes=5e7)] * ranks
    timeline = simulate(schedule, costs, LinkCost(1e-4))
    curves = [curve(one, 80e9) for one in memory(schedule, costs, timeline)]
    data = timeline_data([band("zb-h1", timeline, schedule, memory=curves)])
    start = (
        'window.view = new Timeline(document.getElementById("here"), '
        'JSON.parse(document.getElementById("data").textContent));\n'
    )
    body = f'<div id="here"></div>{embedded("data", data)}'
    path.write_text(frame("frames", body, style=asset("timeline.css"), script=bundle("timeline.js") + start))
    return len(timeline)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actions", type=int, default=100_000)
    parser.add_argument("--ranks", type=int, default=16)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "page.html"
        actions = write(path, given.ranks, given.actions)
        chromium = playwright.chromium.launch(executable_path=browser(path), args=[*FLAGS])
        page: Any = chromium.new_page(viewport={"width": 1280, "height": 800})
        page.goto(path.as_uri())
        page.wait_for_function("window.view && view.drawn")
        print(f"{actions:,} actions on {given.ranks} ranks, a page of {path.stat().st_size / 1e6:.1f} MB")
        print(f"{'':28}{'frame ms':>10}{'p95':>8}{'fps':>7}{'drawing ms':>12}{'p95':>8}")
        for name, move in MOVES.items():
            gaps, drawn = page.evaluate(MEASURE, [move, FRAMES])
            frame_ms, drawing = statistics.median(gaps), statistics.median(drawn)
            gap95, drawn95 = (statistics.quantiles(one, n=20)[-1] for one in (gaps, drawn))
            print(f"{name:28}{frame_ms:10.1f}{gap95:8.1f}{1000 / frame_ms:7.0f}{drawing:12.1f}{drawn95:8.1f}")
        chromium.close()


if __name__ == "__main__":
    main()
