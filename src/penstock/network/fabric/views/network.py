"""Describe in words what a network did to the frames that crossed it, for the end of a run and for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock._base.words import sized
from penstock.network.fabric.views.numbers import seconds

MAX_LATE_SECONDS = 1e-3
"""If the 99th percentile of lateness exceeds this, the switch is saturated."""
MAX_BUSY = 0.9

_EACH_HOST = 16
"""With more hosts than this, only the totals are shown."""

_FATES = {
    "lost": "lost",
    "duplicated": "sent twice",
    "corrupted": "with a wrong bit",
    "reordered": "sent past others",
    "queue_full": "dropped because the queue was full",
    "host_gone": "dropped because a host was gone",
    "no_such_host": "to no host",
}
"""What may happen to a frame: the switch's name for it, and the wording in reports."""

Told = Mapping[str, Any]


def network_lines(
    described: Told,
    *,
    told: Told | None = None,
    happened: Sequence[str] = (),
    elapsed_seconds: float | None = None,
) -> list[str]:
    """Describe a run's network, one fact per line; see `network_facts`.

    `elapsed_seconds`: how long the switch has run; if None, how busy it was is not judged.
    """
    lines = [f"{name:<11}{text}" for name, text in network_facts(described, told=told, happened=happened)]
    reason = None if told is None else saturated(told, elapsed_seconds)
    return lines if reason is None else [*lines, f"warning: {reason}"]


def network_facts(described: Told, *, told: Told | None = None, happened: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Describe a run's network as (name, text) pairs.

    Args:
        described: what `Machines.described` returns.
        told: the switch's counters (`Machines.told`); None without a switch.
        happened: the changes that a scenario made, in words.
    """
    makers = {"tbf": "the kernel's tbf", "switch": "a switch in user space"}
    made, shaper = "as fast as this machine can", described["shaper"]
    if shaper is not None:
        made = f"{described['link']}, by {makers.get(shaper, shaper)}"
    if told is not None and "priority" in told:
        made += f" (priority: {told['priority']})"
    found = [("network", f"{described['hosts']} hosts, {made}")]
    found += [(f"host {host}", f"link {text}") for host, text in sorted(described["own"].items())]
    for host, share in sorted(described["slow"].items()):
        found.append((f"host {host}", f"held to {share:.4g} of a core, by {described['held_back_by']}"))
    found += [("neighbor", text) for text in described["background"]]
    found += [("", remark) for remark in described["remarks"]]
    found += [("change", text) for text in happened]
    if told is None:
        return found
    links: Sequence[Told] = told["links"]
    if len(links) > _EACH_HOST:
        sums = {way: {name: sum(link[way][name] for link in links) for name in links[0][way]} for way in ("up", "down")}
        found.append(("all hosts", _host(sums)))
    else:
        found += [(f"host {host}", _host(link)) for host, link in enumerate(links)]
    late = "no frame passed"
    if told["late"]["worst"] is not None:
        quantiles = ", ".join(f"{name} {seconds(told['late'][name])}" for name in ("p50", "p99", "worst"))
        late = f"{quantiles}: how late frames left"
    return [*found, ("switch", late)]


def saturated(told: Told, elapsed_seconds: float | None = None) -> str | None:
    """Explains, from a switch's counters, why it could not keep up and what to do; None if it kept up."""
    late = told["late"]["p99"]
    found = []
    if late is not None and late > MAX_LATE_SECONDS:
        found.append(f"1% of the frames left more than {seconds(late)} late")
    if told["no_room"]:
        found.append(f"it ran out of memory for a frame {told['no_room']:,} times")
    if elapsed_seconds and told["busy_seconds"] > MAX_BUSY * elapsed_seconds:
        found.append(f"it was busy for {told['busy_seconds'] / elapsed_seconds:.0%} of the time")
    if not found:
        return None
    return (
        f"the switch was saturated: {'; '.join(found)}. The network was worse than requested: pass a lower rate, fewer "
        "hosts, a larger mtu, or a machine with more cores"
    )


def _host(link: Told) -> str:
    ways = []
    for verb, counted in (("out", link["up"]), ("in", link["down"])):
        said = [f"{counted[name]:,} {words}" for name, words in _FATES.items() if counted[name]]
        fates = f" ({', '.join(said)})" if said else ""
        ways.append(f"{verb} {counted['frames']:,} frames, {sized(counted['bytes'])}{fates}")
    if near := link["down"]["background_bytes"]:
        ways.append(f"neighbors {sized(near)}")
    return "; ".join(ways)
