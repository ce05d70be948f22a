"""`penstock report`: writes a run, a trace or a plan as one page."""

from __future__ import annotations

from pathlib import Path

from penstock._base.files import write_text
from penstock.cli._options import REQUIRED, argument, check_suffix, option, output_option
from penstock.cli.explain import PredictionOptions, read_run_folder

EPILOG = """\
The page is one self-contained file: send it, or open it from disk. It shows the same analysis as penstock explain."""
"""Epilog of the help."""


def report(
    run: list[Path] = argument(
        "Directory of a run or of a penstock fabric run; a plan (plan.json); or any input of penstock explain: "
        "timelines, traces of Perfetto or torch's profiler, columns.",
        metavar="RUN...",
        default=REQUIRED,
    ),
    *,
    step: int | None = option("Number of the step; default: the one with the median time."),
    prediction: PredictionOptions,
    out: Path | None = output_option(
        "Page to write; default: report.html in the directory, or next to the file, named after it.", metavar="FILE"
    ),
    png: Path | None = output_option("Also write a screenshot of the page; requires chromium.", metavar="FILE"),
) -> None:
    """Show a run as one page: its summary, every rank's timeline, memory, and the loss.

    The timeline pans and zooms by mouse, touch and keys, and shows what each action waited for.
    """
    from penstock.report.web.page import page
    from penstock.report.web.screenshot import browser, write_picture
    from penstock.report.web.sources import is_fabric, load_contents

    check_suffix("--out", out, ".html", ".htm")
    check_suffix("--png", png, ".png")
    if png is not None:
        browser(png)  # before anything is written
    if len(run) == 1 and is_fabric(run[0]):
        from penstock.network.fabric.results import results
        from penstock.network.fabric.samples import Run as FabricRun
        from penstock.network.fabric.views.page import page as fabric_page

        sampled = FabricRun.read(run[0])
        text = fabric_page(sampled, results(sampled))
    else:
        read_run_folder(run)  # raises if there are several
        text = page(load_contents(run, step, None if prediction == PredictionOptions() else prediction.of))
    target = _target(run[0]) if out is None else out
    write_text(target, text, f"--out {target}")
    print(f"wrote {target}")
    if png is not None:
        write_picture(text, png)
        print(f"wrote {png}")


def _target(run: Path) -> Path:
    """Return report.html in a directory, or the page next to a file, named after it."""
    if run.is_dir():
        return run / "report.html"
    name = run.name.removesuffix(".gz")
    return run.with_name(f"{name.rsplit('.', 1)[0] or name}.html")
