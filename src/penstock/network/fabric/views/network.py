"""Describe in words what a network did to the frames that crossed it, for the end of a run and for reports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock._base.formatting import format_bytes
from penstock.network.fabric.views.numbers import seconds

MAX_LATE_SECONDS = 1e-3
"""If the 99th percentile of lateness exceeds this, the switch is saturated."""
MAX_BUSY = 0.9

_MAX_HOSTS = 16
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

Data = Mapping[str, Any]


def network_lines(described: Data, *, counters: Data | None = None, events: Sequence[str] = ()) -> list[str]:
    """Describe a run's network, one fact per line; see `network_facts`."""
    lines = [f"{name:<11}{text}" for name, text in network_facts(described, counters=counters, events=events)]
    reason = None if counters is None else saturated(counters)
    return lines if reason is None else [*lines, f"warning: {reason}"]


def network_facts(
    described: Data, *, counters: Data | None = None, events: Sequence[str] = ()
) -> list[tuple[str, str]]:
    """Describe a run's network as (name, text) pairs.

    Args:
        described: what `Machines.describe` returns.
        counters: the switch's (`Machines.counters`); None without a switch.
        events: the changes that a scenario made, in words.
    """
    shaper_names = {"tbf": "the kernel's tbf", "switch": "a switch in user space"}
    link_text, shaper = "as fast as this machine can", described["shaper"]
    if shaper is not None:
        link_text = f"{described['link']}, by {shaper_names.get(shaper, shaper)}"
    if counters is not None and "priority" in counters:
        link_text += f" (priority: {counters['priority']})"
    facts = [("network", f"{described['hosts']} hosts, {link_text}")]
    facts += [(f"host {host}", f"link {text}") for host, text in sorted(described["own"].items())]
    for host, share in sorted(described["slow"].items()):
        facts.append((f"host {host}", f"held to {share:.4g} of a core, by {described['held_back_by']}"))
    facts += [("neighbor", text) for text in described["background"]]
    facts += [("", remark) for remark in described["remarks"]]
    facts += [("change", text) for text in events]
    if counters is None:
        return facts
    links: Sequence[Data] = counters["links"]
    if len(links) > _MAX_HOSTS:
        sums = {end: {name: sum(link[end][name] for link in links) for name in links[0][end]} for end in ("up", "down")}
        facts.append(("all hosts", _host(sums)))
    else:
        facts += [(f"host {host}", _host(link)) for host, link in enumerate(links)]
    late = "no frame passed"
    if counters["late"]["worst"] is not None:
        quantiles = ", ".join(f"{name} {seconds(counters['late'][name])}" for name in ("p50", "p99", "worst"))
        late = f"{quantiles}: how late frames left"
    return [*facts, ("switch", late)]


def saturated(counters: Data) -> str | None:
    """Explain, from a switch's counters, why it could not keep up and what to do; None if it kept up."""
    late = counters["late"]["p99"]
    reasons = []
    if late is not None and late > MAX_LATE_SECONDS:
        reasons.append(f"1% of the frames left more than {seconds(late)} late")
    if counters["no_room"]:
        reasons.append(f"it ran out of memory for a frame {counters['no_room']:,} times")
    if (busy := counters["busy_seconds"] / max(counters["seconds"], 1e-9)) > MAX_BUSY:
        reasons.append(f"it was busy for {busy:.0%} of the time")
    if not reasons:
        return None
    return (
        f"the switch was saturated: {'; '.join(reasons)}. The network was worse than requested: pass a lower rate, "
        "fewer hosts, a larger mtu, or a machine with more cores"
    )


def _host(link: Data) -> str:
    parts = []
    for verb, counters in (("out", link["up"]), ("in", link["down"])):
        outcomes = [f"{counters[name]:,} {words}" for name, words in _FATES.items() if counters[name]]
        suffix = f" ({', '.join(outcomes)})" if outcomes else ""
        parts.append(f"{verb} {counters['frames']:,} frames, {format_bytes(counters['bytes'])}{suffix}")
    if near := link["down"]["background_bytes"]:
        parts.append(f"neighbors {format_bytes(near)}")
    return "; ".join(parts)
