"""The arrays that the switch works on, and what their columns mean."""

from __future__ import annotations

from typing import Any, NamedTuple

# Columns of `Tables.lines`. One row per direction: h for host h to the switch, hosts + h for the switch to host h.
BYTE_PS, LIMIT, FREE_NS, LAST_NS, STALL_NS, EVERY_NS, SINCE_NS, HELD_NS, GONE, DRAWN, FILLED = range(11)
NEAR_USED, NEAR_MADE, FRAMES, BYTES, N_LOST, N_DOUBLE, N_CORRUPT, N_REORDERED, N_FULL, N_GONE, N_OTHER = range(11, 22)
NEAR_BYTES, NEAR_FULL, OVERTAKES, LINES = range(22, 26)
COUNTED = {
    "frames": FRAMES, "bytes": BYTES, "lost": N_LOST, "duplicated": N_DOUBLE, "corrupted": N_CORRUPT,
    "reordered": N_REORDERED, "queue_full": N_FULL, "host_gone": N_GONE, "no_such_host": N_OTHER,
    "background_bytes": NEAR_BYTES, "background_queue_full": NEAR_FULL,
}  # fmt: skip
"""The counters reported for each direction, by name."""

# Columns of `Tables.slots`. One row per frame that can be in flight; SPARE is a separate stack of free slots.
LENGTH, SOURCE, TARGET, SPARE = range(4)
# Columns of `Tables.draws`, `Tables.near` and `Tables.heap`.
FATE, DELAY_NS, BIT = range(3)
AT_NS, SIZE = range(2)
DUE_NS, TURN, EVENT = range(3)
# Entries of `Tables.state`. ENOUGH: the decisions that a direction must have left for the loop to continue. From LATE
# on: a histogram of frames over the binary logarithm of their lateness in nanoseconds.
SPARES, WAITING, TURNS, SECONDS, NANOSECONDS, START_NS, LOW, READS, POLLS, FAILED, NO_SLOT = range(11)
WAKING_NS, ENOUGH, WORST_NS, BUSY_NS, LATE = range(11, 16)
PER_OCTAVE = 4
STATE = LATE + 64 * PER_OCTAVE

READS_AT_ONCE = 16
"""The number of frames that the loop reads from one host before it turns to the next."""


class Tables(NamedTuple):
    """All arrays that the loop works on."""

    polls: Any  # (hosts, 2) int32: struct pollfd
    lines: Any  # (directions, LINES) int64
    affects: Any  # (hosts, hosts, 2) uint8: whether the sender's link affects a frame, and whether the receiver's does
    draws: Any  # (directions, block, 3) int64: ring buffers
    near: Any  # (hosts, block, 2) int64: ring buffers of neighbors' frames to each host
    frames: Any  # (slots, bytes) uint8
    slots: Any  # (slots, 4) int64
    heap: Any  # (slots, 3) int64
    state: Any  # (STATE,) int64
