"""An executor, written once more by hand: what `check` says of a schedule is held against what becomes of it here."""

from __future__ import annotations

from collections import Counter, defaultdict

from penstock.schedule import Action, Op, Schedule
from scaffolding.some_schedules import needs_by_hand

MESSAGES = {Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B}
RECEIVES = {Op.RECV_F, Op.RECV_B}


def runs_to_the_end(schedule: Schedule, buffered: bool) -> bool:
    """Whether ranks that go through their rows, each as far as it can, all come to the end."""
    rows = [list(row) for row in schedule.rows]
    needs = needs_by_hand(schedule)
    has_message = {action for row in rows for action in row if action.op in MESSAGES}
    bringing = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}
    done: set[Action] = set()
    at = [0] * len(rows)

    def may_run(action: Action) -> bool:
        if action.op in RECEIVES:
            return True
        if action.op in MESSAGES:
            made = [Op.F] if action.op is Op.SEND_F else [Op.B, Op.I]
            ready = any(Action(action.stage, op, action.microbatch) in done for op in made)
            return ready and (buffered or action.other_end in done)
        if action.op is Op.REDUCE_GRAD:
            ends = {a for row in rows for a in row if a.stage == action.stage and a.op in (Op.B, Op.W)}
            return ends <= done
        receives = {
            a for a in has_message
            if (a.op, a.stage, a.microbatch) == (bringing.get(action.op), action.stage, action.microbatch)
        }  # fmt: skip
        return needs[action] <= done and receives <= done and {a.other_end for a in receives} <= done

    advanced = True
    while advanced:
        advanced = False
        for rank, row in enumerate(rows):
            while at[rank] < len(row) and may_run(row[at[rank]]):
                done.add(row[at[rank]])
                at[rank] += 1
                advanced = True
    return all(place == len(row) for place, row in zip(at, rows, strict=True))


def is_complete(schedule: Schedule) -> bool:
    """Every microbatch forward and back on every stage, on its rank; messages in pairs, in one order at both ends."""
    counts = Counter(action for row in schedule.rows for action in row)
    sent, posted = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(schedule.rows):
        for action in row:
            if schedule.placement.rank_of[action.stage] != rank or counts[action] != 1:
                return False
            if action.op in MESSAGES:
                assert action.peer is not None
                other = schedule.placement.rank_of[action.peer]
                if action.op in RECEIVES:
                    posted[other, rank].append(action.other_end)
                else:
                    sent[rank, other].append(action)
    back = {stage: any(a.stage == stage and a.op.is_backward for a in counts) for stage in range(schedule.stages)}
    for stage in range(schedule.stages):
        for k in schedule.numbers_on(stage):
            ops = {op for op in (Op.F, Op.B, Op.I, Op.W) if Action(stage, op, k) in counts}
            if ops not in ([{Op.F, Op.B}, {Op.F, Op.I, Op.W}] if back[stage] else [{Op.F}]):
                return False
    return sent == posted
