"""Measure a run's links before its trials, and check them against their shapers."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from penstock._base.errors import FabricError
from penstock.network.fabric.emulation import probe
from penstock.network.fabric.emulation.joining import Members
from penstock.network.fabric.emulation.run_file import gathered
from penstock.network.fabric.emulation.spec import Spec
from penstock.network.fabric.emulation.wires import Wire
from penstock.network.fabric.ports import least_delay, topology_of

TOLERANCE = 0.01
"""How far a measured rate may exceed the shaper's, as a fraction: a token bucket lets some bytes through at once."""
TRIES = 3


def measured(spec: Spec, wire: Wire, members: Members) -> list[dict[str, Any]]:
    """Measures both directions between all neighbors, pair by pair, and returns a dict for each; none if links are not
    to be measured, or the backend is not gloo. Raises FabricError: a rate above the shaper's was measured
    repeatedly."""
    if not spec.measures_links or spec.backend != "gloo":
        return []
    links = []
    for pair in probe.neighbors(spec.hosts):
        shaped = ends_of(spec, pair)
        for left in reversed(range(TRIES)):
            found = probe.measure(pair, wire, shaped)
            faults = [fault for way, one in found.items() if shaped and (fault := above_shaper(way, one, shaped[way]))]
            if not faults:
                break
            if not left:
                raise FabricError(faults[0])
        links += [{"from": source, "to": target, **one._asdict()} for (source, target), one in found.items()]
        dist.barrier(group=members.control)
    by_ends = {(one["from"], one["to"]): one for mine in gathered(links, members) for one in mine}
    return list(by_ends.values())


def above_shaper(way: tuple[int, int], found: probe.Measured, ends: probe.Ends) -> str | None:
    """Describes a measured rate that the shapers make impossible; None if it is possible."""
    rate = min(ends.up, ends.down)
    if (found.bytes_per_second or float("inf")) <= rate * (1 + TOLERANCE):
        return None
    said = "no finite rate" if found.bytes_per_second is None else f"{found.bytes_per_second * 8e-6:,.1f} Mbit/s"
    return (
        f"Penstock measured the link from host {way[0]} to host {way[1]} {TRIES} times, at last as {said}, although "
        f"its shaper passes only {rate * 8e-6:,.1f} Mbit/s. This is a bug in Penstock that would make every figure "
        "wrong; run again on a machine with less other work"
    )


def ends_of(spec: Spec, pair: tuple[int, int]) -> dict[tuple[int, int], probe.Ends] | None:
    """Returns what shapes each direction between two hosts; None if unknown."""
    topology = topology_of(spec.network)
    if topology is None:
        return None
    return {
        (a, b): probe.Ends(
            topology.up(a).bytes_per_second, topology.down(b).bytes_per_second, least_delay(topology, a, b)
        )
        for a, b in (pair, pair[::-1])
    }
