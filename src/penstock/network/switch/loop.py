"""The switch's inner loop: read frames, apply their links' rules to each, and deliver it when it is due.

numba compiles it to work on arrays only, with system calls by their names in the C library. It returns to Python every
few milliseconds. There, everything else is done: drawing decisions (frame_fates.py), making a scenario's changes, and
reporting counters.

A frame from a to b goes through these steps, in order:
  1. a's rate: the frame arrives once the previous one has, plus its own length at that rate. (The host's tbf also keeps
     the rate, because TCP must notice its own queue, but it lets some frames pass at once.)
  2. a's link: loss, delay and the like, if they apply to frames from a to b (`Topology.path_impairments`). After
     a stall, the frames that it held leave at the link's rate, and frames that arrived in the meantime follow them.
  3. the queue to b: the frame waits for those ahead of it, and for its own length at the link's rate; if more than the
     limit is waiting, it is dropped. Neighbors' traffic, which exists only in the accounts, is in the same queue. A
     stall of b's link holds up the whole queue.
  4. b's link: loss, delay and the like, if they apply to frames from a to b.
Frames of one direction keep their order, except those that are to be reordered, or where a link allows overtaking. Ties
go to the frame that came first.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from penstock._base.compiled import compiler
from penstock.network.frame_fates import CORRUPT, DUPLICATE, LOST, REORDER
from penstock.network.switch import columns as col
from penstock.network.switch.columns import Tables

# Called by name, because pointers made with ctypes would keep numba from caching the compiled code.
_clock_gettime: Any = types.ExternalFunction("clock_gettime", types.int32(types.int32, types.intp))
_ppoll: Any = types.ExternalFunction("ppoll", types.int32(types.intp, types.uint64, types.intp, types.intp))
_read: Any = types.ExternalFunction("read", types.int64(types.int32, types.intp, types.uint64))
_write: Any = types.ExternalFunction("write", types.int64(types.int32, types.intp, types.uint64))
_MONOTONIC = 1

_AT_PORT, _OUT = 0, 1
_HEADER = 14
_NS = 1_000_000_000
_MIN_WAKING, _MAX_WAKING = 40_000, 200_000


compiled = compiler((*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "frame_fates.py"))
"""The decorator that compiles the switch's inner loop."""

# -- frames in flight, as a heap: the next one due comes first, and ties are first in, first out -----------------------


@compiled
def _before(t: Tables, index: Any, due: Any, turn: Any) -> Any:
    return t.heap[index, col.DUE_NS] < due or (t.heap[index, col.DUE_NS] == due and t.heap[index, col.TURN] < turn)


@compiled
def _set(t: Tables, index: Any, due: Any, turn: Any, event: Any) -> None:
    t.heap[index, col.DUE_NS] = due
    t.heap[index, col.TURN] = turn
    t.heap[index, col.EVENT] = event


@compiled
def push(t: Tables, due: Any, event: Any) -> None:
    index, turn = t.state[col.WAITING], t.state[col.TURNS]
    t.state[col.WAITING] += 1
    t.state[col.TURNS] += 1
    while index > 0:
        parent = (index - 1) >> 1
        if _before(t, parent, due, turn):
            break
        _set(t, index, t.heap[parent, col.DUE_NS], t.heap[parent, col.TURN], t.heap[parent, col.EVENT])
        index = parent
    _set(t, index, due, turn, event)


@compiled
def pop(t: Tables) -> Any:
    first = t.heap[0, col.EVENT]
    t.state[col.WAITING] -= 1
    size = t.state[col.WAITING]
    due, turn, event = t.heap[size, col.DUE_NS], t.heap[size, col.TURN], t.heap[size, col.EVENT]
    index = 0
    while 2 * index + 1 < size:
        child = 2 * index + 1
        if child + 1 < size and _before(t, child + 1, t.heap[child, col.DUE_NS], t.heap[child, col.TURN]):
            child += 1
        if not _before(t, child, due, turn):
            break
        _set(t, index, t.heap[child, col.DUE_NS], t.heap[child, col.TURN], t.heap[child, col.EVENT])
        index = child
    _set(t, index, due, turn, event)
    return first


# -- from host to host -------------------------------------------------------------------------------------------------


@compiled
def now_ns(t: Tables) -> Any:
    """Return the monotonic clock's time."""
    _clock_gettime(_MONOTONIC, t.state.ctypes.data + 8 * col.SECONDS)
    return t.state[col.SECONDS] * _NS + t.state[col.NANOSECONDS]


@compiled
def _after_stall(t: Tables, direction: Any, at: Any) -> Any:
    length, every = t.lines[direction, col.STALL_NS], t.lines[direction, col.EVERY_NS]
    since = at - t.lines[direction, col.SINCE_NS]
    if length == 0 or since < every:  # the first stall comes after a whole period
        return at
    return max(at, at - since % every + length)


@compiled
def _stalled_ns(t: Tables, direction: Any, at: Any) -> Any:
    """Return how long a link has been stalled in total until then."""
    length, every = t.lines[direction, col.STALL_NS], t.lines[direction, col.EVERY_NS]
    since = at - t.lines[direction, col.SINCE_NS]
    if length == 0 or since < every:
        return 0
    return (since // every - 1) * length + min(since % every, length)


@compiled
def _departure(t: Tables, direction: Any, slot: Any, at: Any) -> Any:
    """Return when a frame leaves a host's link that may stall."""
    line = t.lines[direction]
    leaves = _after_stall(t, direction, max(at, line[col.HELD_NS]))
    if leaves > at:
        line[col.HELD_NS] = leaves + t.slots[slot, col.LENGTH] * line[col.BYTE_PS] // 1000
    return leaves


@compiled
def _drop(t: Tables, slot: Any) -> None:
    t.slots[t.state[col.SPARES], col.SPARE] = slot
    t.state[col.SPARES] += 1


@compiled
def _copy(t: Tables, slot: Any) -> Any:
    """Copy a frame to another slot and return that slot, or -1 if there is none."""
    if t.state[col.SPARES] == 0:
        t.state[col.NO_SLOT] += 1
        return -1
    t.state[col.SPARES] -= 1
    copy = t.slots[t.state[col.SPARES], col.SPARE]
    size = t.slots[slot, col.LENGTH]
    for index in range(size):
        t.frames[copy, index] = t.frames[slot, index]
    t.slots[copy, col.LENGTH] = size
    t.slots[copy, col.SOURCE] = t.slots[slot, col.SOURCE]
    t.slots[copy, col.TARGET] = t.slots[slot, col.TARGET]
    return copy


@compiled
def _apply_rules(t: Tables, direction: Any, slot: Any, at: Any, step: Any) -> None:
    """Apply a link's decisions to a frame, which goes on to `step` unless it is lost."""
    line = t.lines[direction]
    index = line[col.DRAWN] % t.draws.shape[1]
    line[col.DRAWN] += 1
    if line[col.FILLED] - line[col.DRAWN] <= t.state[col.ENOUGH]:
        t.state[col.LOW] = 1
    fate = t.draws[direction, index, col.FATE]
    if fate & LOST:
        line[col.N_LOST] += 1
        _drop(t, slot)
        return
    if fate & CORRUPT:
        line[col.N_CORRUPT] += 1
        bit = t.draws[direction, index, col.BIT] % (8 * (t.slots[slot, col.LENGTH] - _HEADER))
        t.frames[slot, _HEADER + (bit >> 3)] ^= np.uint8(1 << (bit & 7))
    leaves = at
    if fate & REORDER:
        line[col.N_REORDERED] += 1
    else:
        leaves = at + t.draws[direction, index, col.DELAY_NS]
        if not line[col.OVERTAKES]:
            leaves = max(leaves, line[col.LAST_NS])
    if direction < t.affects.shape[0]:  # in the other direction, the queue has stalled instead
        leaves = _departure(t, direction, slot, leaves)
    if not fate & REORDER:
        line[col.LAST_NS] = leaves
    if fate & DUPLICATE:
        copy = _copy(t, slot)
        if copy >= 0:
            line[col.N_DOUBLE] += 1
            push(t, leaves, 2 * copy + step)
    push(t, leaves, 2 * slot + step)


@compiled
def _arrival(t: Tables, slot: Any, now: Any) -> Any:
    """Count a frame read from its host, and return when it has arrived at its link's rate."""
    line = t.lines[t.slots[slot, col.SOURCE]]
    size = t.slots[slot, col.LENGTH]
    line[col.FRAMES] += 1
    line[col.BYTES] += size
    line[col.FREE_NS] = max(now, line[col.FREE_NS] + size * line[col.BYTE_PS] // 1000)
    return line[col.FREE_NS]


@compiled
def _forward(t: Tables, slot: Any, at: Any) -> None:
    """Send a frame that has arrived on its way to one host."""
    source, target = t.slots[slot, col.SOURCE], t.slots[slot, col.TARGET]
    line = t.lines[source]
    if line[col.GONE] or t.lines[target, col.GONE]:
        line[col.N_GONE] += 1
        _drop(t, slot)
    elif t.affects[source, target, 0]:
        _apply_rules(t, source, slot, at, _AT_PORT)
    else:
        push(t, at, 2 * slot + _AT_PORT)


@compiled
def _enqueue(t: Tables, direction: Any, size: Any, at: Any) -> Any:
    """Whether there is room in a queue; if so, the link is taken until `FREE_NS`."""
    line = t.lines[direction]
    free = max(line[col.FREE_NS], at)
    waits = free - at - (_stalled_ns(t, direction, free) - _stalled_ns(t, direction, at))
    if waits * 1000 // line[col.BYTE_PS] + size > line[col.LIMIT]:
        return False
    line[col.FREE_NS] = _after_stall(t, direction, free + size * line[col.BYTE_PS] // 1000)
    return True


@compiled
def enqueue_background(t: Tables, host: Any, at: Any) -> None:
    """Put the neighbors' frames that have arrived by then into the queue to a host."""
    line = t.lines[t.affects.shape[0] + host]
    while line[col.NEAR_USED] < line[col.NEAR_MADE]:
        frame = t.near[host, line[col.NEAR_USED] % t.near.shape[1]]
        if frame[col.AT_NS] > at:
            return
        line[col.NEAR_USED] += 1
        if _enqueue(t, t.affects.shape[0] + host, frame[col.SIZE], frame[col.AT_NS]):
            line[col.NEAR_BYTES] += frame[col.SIZE]
        else:
            line[col.NEAR_FULL] += 1


@compiled
def enqueue_all_background(t: Tables) -> None:
    """Do so up to now for all hosts, including those that nothing else sends to."""
    now = now_ns(t)
    for host in range(t.affects.shape[0]):
        enqueue_background(t, host, now)


@compiled
def _at_port(t: Tables, slot: Any, at: Any) -> None:
    """Put a frame into the queue to its receiver."""
    hosts = t.affects.shape[0]
    source, target = t.slots[slot, col.SOURCE], t.slots[slot, col.TARGET]
    direction = hosts + target
    line = t.lines[direction]
    size = t.slots[slot, col.LENGTH]
    line[col.FRAMES] += 1
    line[col.BYTES] += size
    enqueue_background(t, target, at)
    if t.lines[target, col.GONE]:
        line[col.N_GONE] += 1
        _drop(t, slot)
        return
    if not _enqueue(t, direction, size, at):
        line[col.N_FULL] += 1
        _drop(t, slot)
    elif t.affects[source, target, 1]:
        _apply_rules(t, direction, slot, line[col.FREE_NS], _OUT)
    else:
        push(t, line[col.FREE_NS], 2 * slot + _OUT)


@compiled
def _send(t: Tables, slot: Any, due: Any, now: Any) -> None:
    if t.lines[t.slots[slot, col.TARGET], col.GONE]:
        t.lines[t.affects.shape[0] + t.slots[slot, col.TARGET], col.N_GONE] += 1
    elif _write(t.polls[t.slots[slot, col.TARGET], 0], t.frames[slot].ctypes.data, t.slots[slot, col.LENGTH]) < 0:
        t.state[col.FAILED] += 1
    _drop(t, slot)
    late = max(now - due, 1)
    t.state[col.WORST_NS] = max(t.state[col.WORST_NS], late)
    t.state[col.LATE + int(np.log2(late) * col.PER_OCTAVE)] += 1


@compiled
def _receive(t: Tables, source: Any) -> None:
    """Read what a host has sent, up to `READS_AT_ONCE` frames.

    The clock is read after each frame: the process may be stopped at any moment, and a frame that came in the meantime
    must not count as having come before.
    """
    hosts = t.affects.shape[0]
    for _ in range(col.READS_AT_ONCE):
        if t.state[col.SPARES] == 0:
            t.state[col.NO_SLOT] += 1
            return
        slot = t.slots[t.state[col.SPARES] - 1, col.SPARE]
        size = _read(t.polls[source, 0], t.frames[slot].ctypes.data, t.frames.shape[1])
        if size <= _HEADER:
            return
        t.state[col.SPARES] -= 1
        t.state[col.READS] += 1
        t.slots[slot, col.LENGTH] = size
        t.slots[slot, col.SOURCE] = source
        at = _arrival(t, slot, now_ns(t))
        target = np.int64(t.frames[slot, 5]) - 1  # a host's address ends in its number plus one
        if t.frames[slot, 0] & 1:  # broadcast or multicast
            for receiver in range(hosts):
                copy = _copy(t, slot) if receiver != source else -1
                if copy >= 0:
                    t.slots[copy, col.TARGET] = receiver
                    _forward(t, copy, at)
            _drop(t, slot)
        elif 0 <= target < hosts and target != source:
            t.slots[slot, col.TARGET] = target
            _forward(t, slot, at)
        else:
            t.lines[source, col.N_OTHER] += 1
            _drop(t, slot)


@compiled
def _deliver(t: Tables) -> Any:
    """Deliver all that is due, unless decisions run short; return the time."""
    now = now_ns(t)
    while t.state[col.WAITING] > 0 and t.heap[0, col.DUE_NS] <= now and not t.state[col.LOW]:
        due = t.heap[0, col.DUE_NS]
        event = pop(t)
        if event & 1:
            _send(t, event >> 1, due, now)
            now = now_ns(t)
        else:
            _at_port(t, event >> 1, due)
    return now


@compiled
def _wait(t: Tables, now: Any, until_ns: Any) -> Any:
    """Wait until a frame comes or one is due; return whether any came.

    A sleeping process wakes up late: slightly on a busy machine, and by 50 to 100 us on an idle one, whose processors
    sleep as well. There, the timer is set that much earlier, and the rest of the time is spent polling.
    """
    wait = until_ns - now
    if t.state[col.WAITING] > 0:
        early = t.state[col.WAKING_NS] if t.state[col.WAKING_NS] > _MIN_WAKING else 0
        wait = min(wait, t.heap[0, col.DUE_NS] - now - early)
    wait = max(wait, 0)
    t.state[col.SECONDS], t.state[col.NANOSECONDS] = wait // _NS, wait % _NS
    # Without room for a frame, there is no point in polling for one.
    hosts = t.affects.shape[0] if t.state[col.SPARES] > 0 else 0
    ready = _ppoll(t.polls.ctypes.data, hosts, t.state.ctypes.data + 8 * col.SECONDS, 0)
    t.state[col.POLLS] += 1
    if ready == 0 and wait > 0:
        late = now_ns(t) - now - wait
        t.state[col.WAKING_NS] += (min(max(late, 0), _MAX_WAKING) - t.state[col.WAKING_NS]) // 8
    return ready > 0


@compiled
def run(t: Tables, until_ns: Any) -> None:
    """Run until a moment, or until a direction needs more decisions."""
    began = now_ns(t)
    while True:
        now = _deliver(t)
        t.state[col.BUSY_NS] += now - began
        if now >= until_ns or t.state[col.LOW]:
            return
        ready = _wait(t, now, until_ns)
        began = now_ns(t)
        if ready:
            for source in range(t.affects.shape[0]):
                if t.polls[source, 1] >> 16:
                    _receive(t, source)
