"""V-Half, V-Min and 1F1B-V: a block of one microbatch's passes, repeated, decides how much memory is held.

On a V placement rank r owns stages r and 2p - 1 - r. A microbatch has four passes on it, F and f, then b and B
(capitals for the first chunk, on the way down; small letters for the second, on the way up), besides two weight
gradients. A block says in which slot each of them starts. Repeated every 6 slots, which is what the passes of a
microbatch take on a rank, the blocks of all microbatches interlock without a gap, and a rank holds a chunk's
activations from its forward in the block to its backward: the memory of the schedule is that of its block.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from penstock.schedule.action import Action, Op
from penstock.schedule.generators.slots import rows_by_slot
from penstock.schedule.placement import Placement
from penstock.schedule.schedule import Schedule

PERIOD = 6
"""Slots from one microbatch to the next: F, I and W of two chunks, one slot each."""


def v_half(ranks: int, microbatches: int) -> Schedule:
    """Half the memory of 1F1B: a forward every two slots down the V, and every slot on the way up.

    With 2 ranks and 4 microbatches, one column per time slot:

        rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 .   0I0 3I1 0W0 3F2 3W1 0F3 0I1 3I2 0W1 3F3 3I3 0I2 3W2 0I3 3W3 0W2 0W3
        rank 1 | .   1F0 2F0 1F1 2F1 2I0 2W0 1I0 1W0 1F2 2F2 2I1 2W1 1I1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3

    The block (p = 4; the next microbatch's begins in slot 6, and W fills the slots that are left free):

        rank 0 | F  .  .  .  .  .  .  .  .  .  f  .  .  .  b  .  .  .  .  .  .  .  .  .  .  B
        rank 1 | .  .  F  .  .  .  .  .  .  f  .  .  .  .  .  .  b  .  .  .  .  .  .  .  B  .
        rank 2 | .  .  .  .  F  .  .  .  f  .  .  .  .  .  .  .  .  .  b  .  .  .  .  B  .  .
        rank 3 | .  .  .  .  .  .  F  f  .  .  .  .  .  .  .  .  .  .  .  .  b  .  B  .  .  .

    A rank that holds the first chunk for long (rank 0) holds the second only briefly, and vice versa: the sum is the
    same on every rank, (p + 2) // 2 microbatches. See `_tighten` for how the beginning and the end are closed up.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, the schedule V-Half.
    """
    gap = 3 if ranks % 2 == 0 else 0  # keeps b out of the slots of F
    block = [(2 * r, 3 * ranks - 2 - r, 3 * ranks - 1 + gap + 2 * r, 6 * ranks - 2 + gap - r) for r in range(ranks)]
    return Schedule("v-half", Placement.v(ranks), microbatches, _tighten(block, microbatches))


def v_min(ranks: int, microbatches: int) -> Schedule:
    """Use a third of the memory of 1F1B: every pass goes from rank to rank without waiting.

    With 2 ranks and 4 microbatches, one column per time slot:

        rank 0 | 0F0 0F1 .   3F0 3I0 3W0 .   0I0 0W0 3F1 3I1 3W1 0F2 0I1 0W1 3F2 3I2 3W2 0F3 0I2 0W2 3F3 3I3 3W3 .   0I3
        rank 1 | .   1F0 2F0 .   .   2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3

        rank 0 | 0W3
        rank 1 | 1W3

    The block (p = 4; the next microbatch's begins in slot 6, and W fills the slots that are left free):

        rank 0 | F  .  .  .  .  .  .  f  b  .  .  .  .  .  .  B
        rank 1 | .  F  .  .  .  .  f  .  .  b  .  .  .  .  B  .
        rank 2 | .  .  F  .  .  f  .  .  .  .  b  .  .  B  .  .
        rank 3 | .  .  .  F  f  .  .  .  .  .  .  b  B  .  .  .

    No microbatch can get through sooner, so no schedule that keeps all ranks busy holds less: (p + 4) // 3 microbatches
    on every rank. But with nothing waiting there is no slack: if F, I and W do not take equally long the gaps add up,
    and with latency every hop shows.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, the schedule V-Min.
    """
    gap = 2 if ranks % 3 == 0 else 0  # keeps b out of the slots of F
    block = [(r, 2 * ranks - 1 - r, 2 * ranks + gap + r, 4 * ranks - 1 + gap - r) for r in range(ranks)]
    return Schedule("v-min", Placement.v(ranks), microbatches, _tighten(block, microbatches))


def one_f_one_b_v(ranks: int, microbatches: int) -> Schedule:
    """1F1B on a V, without splitting backwards: two thirds of 1F1B's memory for the same bubble.

    With 3 ranks and 4 microbatches, one column per time slot (a backward takes one here, as a forward does):

        rank 0 | 0F0 .   .   .   .   5F0 0F1 5B0 .   .   .   5F1 0F2 5B1 .   .   .   5F2 0F3 5B2 .   .   .   5F3 5B3 0B0
        rank 1 | .   1F0 .   .   4F0 .   .   1F1 .   .   4F1 4B0 .   1F2 .   .   4F2 4B1 .   1F3 1B0 .   4F3 4B2 1B1 4B3
        rank 2 | .   .   2F0 3F0 .   .   .   .   2F1 3F1 .   .   .   .   2F2 3F2 3B0 2B0 .   .   2F3 3F3 3B1 2B1 3B2 2B2

        rank 0 | 0B1 0B2 .   0B3
        rank 1 | 1B2 .   1B3 .
        rank 2 | 3B3 2B3 .   .

    In the block every pass starts as soon as the one before it has ended and its rank is free in that slot of the
    period; a forward takes one slot of the six, a backward two. If a rank's first chunk has its backward late, its
    second chunk has it early, so all ranks hold about the same: slightly more than 2p/3 microbatches, while 1F1B holds
    p on rank 0 and 1 on the last. Its passes follow each other without slack: if a backward does not take twice a
    forward, or messages take time, the gaps add up on the way, and 1F1B is shorter.

    Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024, the schedule 1F1B-V.
    """
    last = 2 * ranks - 1
    down, up = range(ranks), range(ranks, 2 * ranks)
    path = [(s, Op.F, 1) for s in (*down, *up)] + [(s, Op.B, 2) for s in (*reversed(up), *reversed(down))]
    busy: list[set[int]] = [set() for _ in range(ranks)]
    slot, slots = 0, []
    for stage, op, length in path:
        occupied = busy[min(stage, last - stage)]
        while any((slot + i) % PERIOD in occupied for i in range(length)):
            slot += 1
        occupied.update((slot + i) % PERIOD for i in range(length))
        slots += [(slot + PERIOD * k, Action(stage, op, k)) for k in range(microbatches)]
        slot += length
    placement = Placement.v(ranks)
    return Schedule("1f1b-v", placement, microbatches, rows_by_slot(placement, slots))


def _tighten(block: Sequence[tuple[int, int, int, int]], microbatches: int) -> list[list[Action]]:
    """Return the rows of a repeated block, closed up at the beginning and the end without holding more.

    1. Each microbatch gets the block's slots, 6 later than the one before; weight gradients fill each rank's idle
       slots.
    2. Before the first gradient has arrived back at stage 0, and after stage 0's last forward, some slots are free.
       There each pass in turn moves to the first free slot in which it can run, if its rank never holds more than some
       rank did in step 1.
    3. Gaps that no pass needs are closed: each runs as soon as it can, in this order.
    4. The end is closed up once more without the weight gradients, which then fill the remaining idle slots.
    """
    table = _Table(block, microbatches)
    table.add_weights()
    table.tighten(beginning=True)
    table.close_gaps()
    table.remove_weights()
    table.tighten(beginning=False)
    table.add_weights()
    return table.rows()


class _Table:
    """The slot of each action, and for each rank the action in each slot."""

    def __init__(self, block: Sequence[tuple[int, int, int, int]], microbatches: int) -> None:
        self._ranks, self._last = len(block), microbatches - 1
        self._slot: dict[Action, int] = {}
        self._by_slot: list[dict[int, Action]] = [{} for _ in block]
        top = 2 * self._ranks - 1
        for rank, starts in enumerate(block):
            passes = ((rank, Op.F), (top - rank, Op.F), (top - rank, Op.I), (rank, Op.I))
            for k in range(microbatches):
                for start, (stage, op) in zip(starts, passes, strict=True):
                    self._put(Action(stage, op, k), start + PERIOD * k)

    def rows(self) -> list[list[Action]]:
        return [[action for _, action in sorted(by_slot.items())] for by_slot in self._by_slot]

    def _rank_of(self, action: Action) -> int:
        return min(action.stage, 2 * self._ranks - 1 - action.stage)

    def _put(self, action: Action, slot: int) -> None:
        by_slot = self._by_slot[self._rank_of(action)]
        if action in self._slot:
            del by_slot[self._slot[action]]
        self._slot[action], by_slot[slot] = slot, action

    def add_weights(self) -> None:
        """Put each W into the first idle slot after its I, in the order of the Is."""
        for by_slot in self._by_slot:
            pending: list[Action] = []
            slot, end = 0, max(by_slot)
            while slot <= end or pending:
                if (action := by_slot.get(slot)) is None:
                    if pending:
                        self._put(pending.pop(0), slot)
                elif action.op is Op.I:
                    pending.append(Action(action.stage, Op.W, action.microbatch))
                slot += 1

    def remove_weights(self) -> None:
        for action in [action for action in self._slot if action.op is Op.W]:
            del self._by_slot[self._rank_of(action)][self._slot.pop(action)]

    def close_gaps(self) -> None:
        """Move every action as early as the order on its rank and what it waits for allow."""
        free = [0] * self._ranks
        for action, _ in sorted(self._slot.items(), key=lambda entry: entry[1]):
            rank = self._rank_of(action)
            self._slot[action] = max(free[rank], self._ready(action))
            free[rank] = self._slot[action] + 1
        self._by_slot = [{} for _ in range(self._ranks)]
        for action, slot in self._slot.items():
            self._by_slot[self._rank_of(action)][slot] = action

    def tighten(self, *, beginning: bool) -> None:
        """Move the actions at the end, and with `beginning` those there, to earlier slots: see `_tighten`."""
        explicit = any(action.op is Op.W for action in self._slot)
        curves = [_ActivationCurve(by_slot, explicit=explicit) for by_slot in self._by_slot]
        limit = max(curve.peak for curve in curves)
        first_gradient, last_forward = self._slot[Action(0, Op.I, 0)], self._slot[Action(0, Op.F, self._last)]
        order = sorted(self._slot.items(), key=lambda entry: (entry[1], self._rank_of(entry[0])))
        for action, slot in order:
            if not (slot > last_forward or (beginning and slot < first_gradient)):
                continue
            rank = self._rank_of(action)
            by_slot, curve = self._by_slot[rank], curves[rank]
            for earlier in range(self._ready(action), slot):
                if earlier not in by_slot:
                    self._put(action, earlier)
                    if curve.accepts_move(earlier, slot, limit):
                        break
                    self._put(action, slot)

    def _ready(self, action: Action) -> int:
        """Return the first slot after everything that an action waits for, and after its op of the previous
        microbatch."""
        return max((self._slot[need] + 1 for need in self._needs(action)), default=0)

    def _needs(self, action: Action) -> Iterable[Action]:
        stage, k = action.stage, action.microbatch
        assert k is not None
        if k > 0:
            yield Action(stage, action.op, k - 1)
        if action.op is Op.F and stage > 0:
            yield Action(stage - 1, Op.F, k)
        if action.op is Op.I:
            yield Action(stage, Op.F, k)
            if stage < 2 * self._ranks - 1:
                yield Action(stage + 1, Op.I, k)
        if action.op is Op.W:
            yield Action(stage, Op.I, k)


class _ActivationCurve:
    """How many chunks' activations a rank holds after each slot, from F to W.

    Args:
        by_slot: its actions by slot; callers may move them.
        explicit: whether Ws are among them; otherwise idle slots count as Ws.
    """

    def __init__(self, by_slot: dict[int, Action], *, explicit: bool) -> None:
        self._by_slot, self._explicit = by_slot, explicit
        self._after = [(0, 0)]  # held, and Ws that are pending, before each slot and at the end
        for slot in range(max(by_slot) + 1):
            self._after.append(self._step(slot, *self._after[-1]))

    @property
    def peak(self) -> int:
        return max(count for count, _ in self._after)

    def accepts_move(self, earlier: int, slot: int, limit: int) -> bool:
        """Count again, now that an action has moved to an earlier slot. Return whether the rank stays within its limit;
        only then is the new count kept."""
        states = [self._after[earlier]]
        for index in range(earlier, len(self._after) - 1):
            states.append(self._step(index, *states[-1]))
            if states[-1][0] > limit:
                return False
            if index >= slot and states[-1] == self._after[index + 1]:
                break
        self._after[earlier : earlier + len(states)] = states
        return True

    def _step(self, slot: int, count: int, pending: int) -> tuple[int, int]:
        action = self._by_slot.get(slot)
        if action is None:
            return (count - 1, pending - 1) if pending and not self._explicit else (count, pending)
        if action.op is Op.I:
            return count, pending + 1
        return count + (1 if action.op is Op.F else -1), pending
