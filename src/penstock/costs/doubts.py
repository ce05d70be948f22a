"""What the numbers of a profile say against themselves: that the machine was busy while they were measured."""

from __future__ import annotations

from itertools import pairwise

from penstock._base.words import counted
from penstock.costs.profile import Profile

BUSY = 0.25
"""Times that spread by more than this part of their median were not measured on a quiet machine."""
SPLIT_RATIO, SPLIT_SECONDS = 2.0, 1e-3
"""A forward does much the same where backwards are split: it does not take twice as long and a millisecond."""


def doubts(profile: Profile) -> tuple[str, ...]:
    """Why not to trust the times of a profile; empty if nothing speaks against them, or if none were measured."""
    if profile.source != "measured":
        return ()
    found, sizes = [], profile.each_size
    if (varies := variation(profile)) > BUSY:
        found.append(f"times vary by {varies:.0%} from run to run; measure again while the machine does nothing else")
    for size in sizes:
        plain = sum(unit.forward_seconds for unit in size.units)
        split = sum(unit.split.forward_seconds for unit in size.units)
        if max(plain, split) > SPLIT_RATIO * min(plain, split) + SPLIT_SECONDS:
            found.append(
                f"forwards of {counted(size.rows, 'row')} took {split * 1e3:.3g} ms where backwards are split, and "
                f"{plain * 1e3:.3g} ms otherwise: something else ran; measure again"
            )
    for smaller, larger in pairwise(sizes):
        if _seconds(larger) < _seconds(smaller):
            found.append(
                f"microbatches of {counted(larger.rows, 'row')} took less time than those of {smaller.rows}: something "
                "else ran; measure again"
            )
    return tuple(found)


def _seconds(size: Profile) -> float:
    return sum(unit.seconds for unit in size.units)


def variation(profile: Profile) -> float:
    """How much its times vary from run to run, as a fraction: of its sizes the most, of units by the time of each."""
    totals = [(_seconds(size), sum(unit.seconds * unit.spread for unit in size.units)) for size in profile.each_size]
    return max(spread / seconds if seconds else 0.0 for seconds, spread in totals)
