"""`penstock devices`: lists the known devices, with their specifications and sources."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING

from penstock._base.formatting import format_bytes
from penstock.cli._options import argument, output_option, print_json, screen
from penstock.report.text import print_columns

if TYPE_CHECKING:
    from penstock.costs.hardware import Interconnect

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
    from penstock.costs.hardware import devices as all_devices

    specs = [device(name)] if name is not None else list(all_devices().values())
    if as_json:
        print_json([asdict(spec) for spec in specs])
        return
    console = screen()
    columns: dict[str, Iterable[object]] = {"device": [spec.key for spec in specs]}
    for dtype, head in _PEAKS.items():
        peaks = [spec.flops_per_second.get(dtype) for spec in specs]
        columns[head] = ["-" if peak is None else f"{peak / 1e12:,.4g}" for peak in peaks]
    columns |= {
        "memory": [format_bytes(spec.memory_bytes) for spec in specs],
        "GB/s": [f"{spec.bytes_per_second / 1e9:,.0f}" for spec in specs],
        "link": [_rate(spec.link) for spec in specs],
        "joins": [f"{spec.link.devices:,}" if spec.link and spec.link.devices else "-" for spec in specs],
        "network": [_rate(spec.network) for spec in specs],
    }
    print_columns(console, columns)
    console.print()
    for spec in specs:
        cables = [cable.name for cable in (spec.link, spec.network) if cable is not None]
        aliases = f", also {', '.join(spec.aliases)}" if spec.aliases else ""
        console.print(f"{spec.key}{aliases}: {'; '.join([spec.name, *cables])}", soft_wrap=True)
        for source in spec.sources:
            console.print(f"    {source}", style="dim", soft_wrap=True)
    console.print()
    console.print(_SYMBOLS, style="dim")


def _rate(cable: Interconnect | None) -> str:
    return "-" if cable is None else f"{cable.bytes_per_second / 1e9:,.4g}"
