"""The arrays that the switch works on, and what their columns mean."""

from __future__ import annotations

from typing import Any, NamedTuple

# Of `Tables.lines`, a row for each direction: host h to the switch is row h, the switch to host h row hosts + h.
BYTE_PS, LIMIT, FREE_NS, LAST_NS, STALL_NS, EVERY_NS, SINCE_NS, HELD_NS, GONE, DRAWN, FILLED = range(11)
NEAR_USED, NEAR_MADE, FRAMES, BYTES, N_LOST, N_TWICE, N_CORRUPT, N_JUMPED, N_FULL, N_GONE, N_OTHER = range(11, 22)
NEAR_BYTES, NEAR_FULL, LOOSE, LINES = range(22, 26)
COUNTED = {
    "frames": FRAMES, "bytes": BYTES, "lost": N_LOST, "duplicated": N_TWICE, "corrupted": N_CORRUPT,
    "reordered": N_JUMPED, "queue_full": N_FULL, "host_gone": N_GONE, "no_such_host": N_OTHER,
    "background_bytes": NEAR_BYTES, "background_queue_full": NEAR_FULL,
}  # fmt: skip
"""What is reported of a direction, by name."""

# Of `Tables.slots`, a row for each frame that can be under way; SPARE is a stack of its own.
LENGTH, SOURCE, TARGET, SPARE = range(4)
# Of `Tables.draws`, `Tables.near` and `Tables.heap`.
FATE, DELAY_NS, BIT = range(3)
AT_NS, SIZE = range(2)
DUE_NS, TURN, WHAT = range(3)
# Of `Tables.state`. ENOUGH: decisions that a direction must have left for the loop to go on. From LATE on: frames, by
# the binary logarithm of the nanoseconds that they were late.
SPARES, WAITING, TURNS, SECONDS, NANOSECONDS, START_NS, LOW, READS, POLLS, FAILED, NO_SLOT = range(11)
WAKING_NS, ENOUGH, LATE_NS, WORST_NS, BUSY_NS, LATE = range(11, 17)
PER_OCTAVE = 4
STATE = LATE + 64 * PER_OCTAVE

READS_AT_ONCE = 16
"""Frames that the loop reads from a host before it looks at the next one."""


class Tables(NamedTuple):
    """All that the loop works on."""

    polls: Any  # (hosts, 2) int32: struct pollfd
    lines: Any  # (directions, LINES) int64
    meets: Any  # (hosts, hosts, 2) uint8: whether a frame meets what its sender's link does, and its receiver's
    draws: Any  # (directions, block, 3) int64: a ring
    near: Any  # (hosts, block, 2) int64: a ring of a neighbour's frames towards each host
    frames: Any  # (slots, bytes) uint8
    slots: Any  # (slots, 4) int64
    heap: Any  # (slots, 3) int64
    state: Any  # (STATE,) int64
