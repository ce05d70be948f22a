"""`penstock devices`: lists the devices whose specifications are known, with their sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from rich.text import Text

from penstock._base.words import sized
from penstock.cli._options import argument, output_option, print_json, screen
from penstock.report.text import print_columns

if TYPE_CHECKING:
    from penstock.costs.hardware import Cable

_SYMBOLS = (
    "Dense peaks of matrix products in TFLOP/s, without structured sparsity; - where the vendor states none. Memory "
    "and its bandwidth. Link: between two devices of a host, in GB/s one way, and how many devices it joins; network: "
    "a device's share of its host's. For another device, write a .toml file with a table as in "
    "penstock/costs/hardware/devices.toml."
)

_PEAKS = {"float32": "fp32", "tf32": "tf32", "bfloat16": "bf16", "float16": "fp16", "float8": "fp8"}


def devices(
    name: str | None = argument("Name of one device.", metavar="[NAME]", show_default=False),
    as_json: bool = output_option("Print only one JSON list.", "--json", default=False),
) -> None:
    """List the devices for which plans and estimates can be made: peaks, memory, links, and their sources.

    `penstock profile --device NAME` estimates a model's costs on one, and
    `penstock plan --device NAME` plans for many.
    """
    from penstock.costs.hardware import device
    from penstock.costs.hardware import devices as known

    found = [device(name)] if name is not None else list(known().values())
    if as_json:
        print_json([asdict(each) for each in found])
        return
    console = screen()
    columns: dict[str, Iterable[object]] = {"device": [each.key for each in found]}
    for dtype, head in _PEAKS.items():
        peaks = [each.flops_per_second.get(dtype) for each in found]
        columns[head] = ["-" if peak is None else f"{peak / 1e12:,.4g}" for peak in peaks]
    columns |= {
        "memory": [sized(each.memory_bytes) for each in found],
        "GB/s": [f"{each.bytes_per_second / 1e9:,.0f}" for each in found],
        "link": [_rate(each.link) for each in found],
        "joins": [f"{each.link.devices:,}" if each.link and each.link.devices else "-" for each in found],
        "network": [_rate(each.network) for each in found],
    }
    print_columns(console, columns)
    console.print()
    for each in found:
        cables = [cable.name for cable in (each.link, each.network) if cable is not None]
        also = f", also {', '.join(each.aliases)}" if each.aliases else ""
        console.print(Text(f"{each.key}{also}: {'; '.join([each.name, *cables])}"), soft_wrap=True)
        for source in each.sources:
            console.print(Text(f"    {source}", "dim"), soft_wrap=True)
    console.print()
    console.print(_SYMBOLS, style="dim", markup=False)


def _rate(cable: Cable | None) -> str:
    return "-" if cable is None else f"{cable.bytes_per_second / 1e9:,.4g}"
