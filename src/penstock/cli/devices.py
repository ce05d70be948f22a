"""`penstock devices`: lists the devices whose specifications are known, with their sources."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from penstock._base.words import sized
from penstock.cli._options import option
from penstock.report.text import print_unbroken, table

if TYPE_CHECKING:
    from penstock.costs.hardware import Cable, Device

_SYMBOLS = (
    "Dense peaks of matrix products in TFLOP/s, without structured sparsity; - where the vendor states none. Memory, "
    "and its bandwidth. Link: what two devices of a host send each other, in GB/s one way, and how many it joins; "
    "network: a device's share of its host's. Another device: a .toml file with a table as in "
    "penstock/costs/hardware/devices.toml."
)

_PEAKS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


def devices(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only this one.", show_default=False)] = None,
    as_json: Annotated[bool, option("Print only one JSON list.", "--json")] = False,
) -> None:
    """List the devices for which plans and estimates can be made: peaks, memory, links, and where the figures are from.

    `penstock profile --device NAME` estimates a model's costs on one, and
    `penstock plan --device NAME` plans for many.
    """
    from penstock.costs.hardware import device
    from penstock.costs.hardware import devices as known

    found = [device(name)] if name is not None else list(known().values())
    if as_json:
        print(json.dumps([asdict(each) for each in found]))
        return
    console = Console(highlight=False)
    made = table("device", *_PEAKS.values(), "memory", "GB/s", "link", "joins", "network", left=1)
    for each in found:
        made.add_row(each.key, *_row(each))
    print_unbroken(console, made)
    console.print()
    for each in found:
        console.print(Text(_details(each)), soft_wrap=True)
        for source in each.sources:
            console.print(Text(f"    {source}", "dim"), soft_wrap=True)
    console.print()
    console.print(_SYMBOLS, style="dim", markup=False)


def _row(each: Device) -> list[str]:
    peaks = (each.flops_per_second.get(dtype) for dtype in _PEAKS)
    return [
        *("-" if peak is None else f"{peak / 1e12:,.4g}" for peak in peaks),
        sized(each.memory_bytes),
        f"{each.bytes_per_second / 1e9:,.0f}",
        _rate(each.link),
        "-" if each.link is None or not each.link.devices else f"{each.link.devices:,}",
        _rate(each.network),
    ]


def _rate(cable: Cable | None) -> str:
    return "-" if cable is None else f"{cable.bytes_per_second / 1e9:,.4g}"


def _details(each: Device) -> str:
    also = f", also {', '.join(each.aliases)}" if each.aliases else ""
    cables = [cable.name for cable in (each.link, each.network) if cable is not None]
    return f"{each.key}{also}: {each.name}{'; ' if cables else ''}{'; '.join(cables)}"
