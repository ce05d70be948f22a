"""`penstock report`: a run, a trace or a plan as one page to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli._spread import OUTPUT_PANEL, spread
from penstock.files import reported_as_damage, write_text

if TYPE_CHECKING:
    from penstock.explain import Predicted, Run

EPILOG = """\
The page is one file without references: send it, or open it from disk. What it says of idle time and of changes is \
what penstock explain says."""
"""Printed below the options."""


@spread
def report(
    run: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN...",
            help="The folder of a run; a plan (plan.json); the folder of a run of penstock fabric; or what "
            "penstock explain reads: timelines, traces of Perfetto or torch's profiler, columns.",
        ),
    ],
    step: Annotated[int | None, typer.Option(help="Which step; by default the one whose time is the median.")] = None,
    profile: Annotated[
        Path | None, typer.Option(metavar="FILE", help="What `penstock profile` wrote, to compare with.")
    ] = None,
    cuts: Annotated[
        str | None, typer.Option(help="With --profile, the cuts of the run: a,b,c; by default the profile's own best.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The plan of the run, from `penstock plan`, to compare with.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Where the page goes; by default report.html in the folder, or beside the file, named after it.",
            rich_help_panel=OUTPUT_PANEL,
        ),
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="A picture of the page as well; needs chromium.", rich_help_panel=OUTPUT_PANEL
        ),
    ] = None,
) -> None:
    """Show a run as one page: its summary, every rank's timeline, memory, and the loss.

    The timeline pans and zooms by mouse, touch and keys, and tells what each action waited for.
    """
    from penstock.cli.explain import folder_of, predicted_by
    from penstock.cli.show import refuse_other
    from penstock.web.page import page
    from penstock.web.picture import browser, write_picture
    from penstock.web.sources import is_fabric, shown

    def prediction(found: Run) -> Predicted | None:
        return predicted_by(found, profile, cuts, plan, folder_of(run))

    refuse_other("--out", out, ".html", ".htm")
    refuse_other("--png", png, ".png")
    if png is not None:
        browser(png)  # before anything is written
    if len(run) == 1 and is_fabric(run[0]):
        from penstock.fabric.results import results
        from penstock.fabric.samples import Run as FabricRun
        from penstock.fabric.views.page import page as fabric_page

        with reported_as_damage(str(run[0])):
            sampled = FabricRun.read(run[0])
            text = fabric_page(sampled, results(sampled))
    else:
        other = profile is not None or plan is not None
        text = page(shown(run, step, prediction, other_prediction=other))
    target = _target(run[0]) if out is None else out
    write_text(target, text, f"--out {target}")
    print(f"wrote {target}")
    if png is not None:
        write_picture(text, png)
        print(f"wrote {png}")


def _target(run: Path) -> Path:
    """report.html in a folder; beside a file, named after it."""
    if run.is_dir():
        return run / "report.html"
    name = run.name.removesuffix(".gz")
    return run.with_name(f"{name.rsplit('.', 1)[0] or name}.html")
