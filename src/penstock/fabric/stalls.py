"""Find the trials that met a requested stall, because their times say nothing about the rest of the network."""

from __future__ import annotations

from penstock.fabric.samples import Run


def stalled(run: Run) -> tuple[int, ...]:
    """Returns the trials during which a link stood still, as reported by the switch; empty if no stall was requested.

    The switch and the hosts read the same clock, that of their machine.
    """
    told = (run.record.get("switch") or {}).get("stalls") or ()
    if not told or not len(run.start_ns):
        return ()
    taking = run.end_ns >= 0
    found = []
    for trial in range(len(run.start_ns)):
        begin, end = int(run.start_ns[trial][taking[trial]].min()), int(run.end_ns[trial].max())
        if any(_meets(begin, end, **one) for one in told):
            found.append(trial)
    return tuple(found)


def _meets(begin: int, end: int, since_ns: int, length_ns: int, every_ns: int, until_ns: int | None) -> bool:
    """Whether the last stall that began before `end`, if there was one, was still going on at `begin`."""
    last = end if until_ns is None else min(end, until_ns)
    turn = (last - since_ns) // every_ns
    over = since_ns + turn * every_ns + length_ns
    return turn >= 1 and begin < (over if until_ns is None else min(over, until_ns))
