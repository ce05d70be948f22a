"""A link in the words of tc, for kernels that have netem. Which of them it can do, and what it needs beside."""

from __future__ import annotations

import math

from penstock.network.impairment import Bursts, Chance, Impairment
from penstock.network.link import Link
from penstock.network.topology import Topology


def why_not_netem(topology: Topology) -> str | None:
    """What netem cannot do of this; None if it can do all."""
    if topology.own:
        return "netem does not tell whom a frame is for, so one host cannot have a link of its own"
    for link in (topology.link, topology.link.down):
        if link is None:
            continue
        if link.impairment.stall_seconds:
            return "netem has no stalls"
        if link.impairment.overtaking:
            return "netem keeps the order of frames where it keeps a rate"
        chances = (link.impairment.loss, link.impairment.duplicate, link.impairment.corrupt, link.impairment.reorder)
        if any(isinstance(chance, Chance) and chance.correlation for chance in chances) or link.impairment.correlation:
            return "netem's correlation changes the share that it is of"
    return None


def netem(link: Link, seed: int | None = None, direction: int = 0) -> str:
    """The words for tc: what follows `qdisc add dev eth0 root handle 1:`.

    `direction` is a number that no other of the network has, as two with one seed would lose the same frames.

    netem counts frames, not bytes, in its queue: it gets room for what is delayed at the rate, twice, beside the
    limit. Segments must not be put together (`gso_max_segs 1`), as it loses what it gets, and not what is on the wire.
    """
    impairment = link.impairment
    under_way = link.bytes_per_second * impairment.longest_seconds
    limit = 1000 + math.ceil((2 * under_way + link.limit_bytes) / link.frame_bytes)
    words = ["netem", f"limit {limit}", *_delay(impairment), *_loss(impairment.loss)]
    for name in ("duplicate", "corrupt", "reorder"):
        chance: Chance = getattr(impairment, name)
        if chance.share:
            words.append(f"{name} {_percent(chance.share)}")
    if impairment.reorder.share and impairment.gap > 1:
        words.append(f"gap {impairment.gap}")
    words.append(f"rate {round(link.bytes_per_second * 8)}bit")
    return " ".join([*words, *([] if seed is None else [f"seed {(1000003 * seed + direction) % 2**63}"])])


def _delay(impairment: Impairment) -> list[str]:
    if not impairment.delay_seconds and not impairment.jitter_seconds:
        return []
    # tc takes a distribution beside a delay of more than nothing alone.
    words = [f"delay {_time(max(impairment.delay_seconds, 1e-6))}"]
    if impairment.jitter_seconds:
        words.append(_time(impairment.jitter_seconds))
        if impairment.distribution != "uniform":
            words.append(f"distribution {impairment.distribution}")
    return words


def _loss(loss: Chance | Bursts) -> list[str]:
    if isinstance(loss, Bursts):
        shares = (loss.to_bad, loss.to_good, loss.loss_in_bad, loss.loss_in_good)
        return [f"loss gemodel {' '.join(_percent(share) for share in shares)}"]
    return [f"loss {_percent(loss.share)}"] if loss.share else []


def _percent(share: float) -> str:
    return f"{share * 100:.7g}%"


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3f}us"
