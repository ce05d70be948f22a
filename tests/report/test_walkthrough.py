"""The words of a walk-through: by hand for small schedules, and what they speak of for every generator."""

from __future__ import annotations

import pytest

from penstock.report import walkthrough
from penstock.schedule import add_communication, add_sharding, generate, grid, names

BY_HAND = {
    ("1f1b", 0): """
rank 0 runs the forward of microbatch 0 on stage 0, on its piece of the batch.
rank 1 waits: the forward of microbatch 0 on stage 1 needs the forward of microbatch 0 on stage 0, which rank 0 runs in
    this slot.""",
    ("1f1b", 2): """
rank 0 waits: the backward of microbatch 0 on stage 0 needs the backward of microbatch 0 on stage 1, which rank 1 runs
    in this slot.
rank 1 runs the backward of microbatch 0 on stage 1, from the loss and with what its forward kept in slot 1.""",
    ("naive", 1): """
rank 0 waits: the backward of microbatch 0 on stage 0 needs the backward of microbatch 0 on stage 1, which rank 1 runs
    in slot 2.
rank 1 runs the forward of microbatch 0 on stage 1, with the output that rank 0 sent at the end of slot 0.""",
    ("1f1b", 3): """
rank 0 runs the backward of microbatch 0 on stage 0, with what its forward kept in slot 0 and with the gradient that
    rank 1 sent at the end of slot 2.
rank 1 runs the forward of microbatch 1 on stage 1, with the output that rank 0 sent at the end of slot 1.""",
    ("1f1b", 5): """
rank 0 runs the backward of microbatch 1 on stage 0, with what its forward kept in slot 1 and with the gradient that
    rank 1 sent at the end of slot 4.
rank 1 has finished: its last work was in slot 4.""",
    ("zb-v", 13): """
rank 0 computes the weight gradient of microbatch 1 on stage 0, with what its input gradient left in slot 12.
rank 1 has finished: its last work was in slot 12.""",
    ("chimera", 1): """
rank 0 runs the forward of microbatch 1 on stage 3, the copy of stage 1, with the output that rank 1 sent at the end of
    slot 0.
rank 1 runs the forward of microbatch 0 on stage 1, with the output that rank 0 sent at the end of slot 0.""",
}
"""What two ranks do with two microbatches, by schedule and slot."""


@pytest.mark.parametrize(("name", "slot"), BY_HAND)
def test_words_by_hand(name: str, slot: int) -> None:
    walk = walkthrough(generate(name, 2, 2))
    said = " ".join(f"{moment.text}." for moment in walk.at(slot))
    assert said == " ".join(BY_HAND[name, slot].split())
    idle = sum(word in said for word in ("waits", "has finished"))
    assert walk.headline(slot) == f"slot {slot} of {name}: {2 - idle} of 2 ranks at work"


@pytest.mark.parametrize("name", names())
def test_every_action_stands_in_its_slot_with_what_it_needs(name: str) -> None:
    """Where the grid draws it; and nobody is idle without a reason."""
    schedule = generate(name, 4, 8)
    drawn = [line.partition("|")[2].split() for line in grid(schedule, 10**6).splitlines()]
    rows = walkthrough(schedule).ranks
    place = {moment.action: (moment.rank, moment.slot) for row in rows for moment in row if moment.action}
    for row, cells in zip(rows, drawn, strict=True):
        assert [str(moment.action or ".")[-len(cell) :] for moment, cell in zip(row, cells, strict=True)] == cells
        for slot, moment in enumerate(row):
            assert all(place[one.action] == (one.rank, one.slot) for one in moment.needs)
            if moment.action is not None:
                assert all(one.slot < slot for one in moment.needs)
            elif any(later.action for later in row[slot:]):
                assert moment.needs, f"{moment.text}: idle without a reason"
                assert all(one.slot >= slot for one in moment.needs)


def test_messages_and_gathers_make_no_difference() -> None:
    plain = generate("1f1b", 3, 4)
    for schedule in (add_communication(plain), add_sharding(plain, {0, 1, 2}, 1)):
        assert walkthrough(schedule).ranks == walkthrough(plain).ranks


def test_overlaps_are_said() -> None:
    texts = [moment.text for moments in walkthrough(generate("dualpipe", 4, 8)).ranks for moment in moments]
    assert any("may run at the same time" in text for text in texts)
    assert not any("at the same time" in m.text for ms in walkthrough(generate("zb-v", 4, 8)).ranks for m in ms)
