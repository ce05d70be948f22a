"""Describe in words what a network did to the frames that crossed it, for the end of a run and for reports."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """Describes a run's network, one fact per line.

    Args:
        described: what `Machines.described` returns.
        told: the switch's counters (`Machines.told`); None without a switch.
        happened: the changes that a scenario made, in words.
        elapsed_seconds: how long the switch has run; if None, how busy it was is not judged.
    """
    found = network_facts(described, told=told, happened=happened)
    lines = [f"{name:<11}{text}" for name, text in found]
    reason = None if told is None else saturated(told, elapsed_seconds)
    return lines if reason is None else [*lines, f"warning: {reason}"]


def network_facts(described: Told, *, told: Told | None = None, happened: Sequence[str] = ()) -> list[tuple[str, str]]:
    """Returns the same facts as `network_lines`, as (name, text) pairs."""
    link = described["link"]
    makers = {"tbf": "the kernel's tbf", "switch": "a switch in user space"}
    shaper = described["shaper"]
    made = "as fast as this machine can" if shaper is None else f"{link}, by {makers.get(shaper, shaper)}"
    if told is not None:
        made += f" (priority: {told['priority']})" if "priority" in told else ""
    found = [("network", f"{described['hosts']} hosts, {made}")]
    found += [(f"host {host}", f"link {text}") for host, text in sorted(described["own"].items())]
    found += [
        (f"host {host}", f"held to {share:.4g} of a core, by {described['held_back_by']}")
        for host, share in sorted(described["slow"].items())
    ]
    found += [("neighbor", text) for text in described["background"]]
    found += [("", remark) for remark in described["remarks"]]
    found += [("change", text) for text in happened]
    if told is not None:
        found += [*_hosts(told), ("switch", _late(told))]
    return found


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


def _hosts(told: Told) -> Iterator[tuple[str, str]]:
    """Describes what happened to each host's frames, or to all hosts' frames in total if there are many."""
    links: Sequence[Told] = told["links"]
    if len(links) > _EACH_HOST:
        sums = {way: {name: sum(link[way][name] for link in links) for name in links[0][way]} for way in ("up", "down")}
        yield "all hosts", _host(sums)
        return
    for host, link in enumerate(links):
        yield f"host {host}", _host(link)


def _host(link: Told) -> str:
    ways = []
    for verb, counted in (("out", link["up"]), ("in", link["down"])):
        said = [f"{counted[name]:,} {words}" for name, words in _FATES.items() if counted[name]]
        fates = f" ({', '.join(said)})" if said else ""
        ways.append(f"{verb} {counted['frames']:,} frames, {sized(counted['bytes'])}{fates}")
    if near := link["down"]["background_bytes"]:
        ways.append(f"neighbors {sized(near)}")
    return "; ".join(ways)


def _late(told: Told) -> str:
    late = told["late"]
    if late["worst"] is None:
        return "no frame passed"
    quantiles = ", ".join(f"{name} {seconds(late[name])}" for name in ("p50", "p99", "worst"))
    return f"{quantiles}: how late frames left"
