from __future__ import annotations

import pytest

from penstock._base.errors import ArgumentError
from penstock.schedule import add_communication, generate, grid, reduce_ties


def test_messages_and_reductions_take_no_slot() -> None:
    schedule = generate("1f1b", 3, 4)
    assert grid(reduce_ties(add_communication(schedule), [[0, 2]])) == grid(schedule)


def test_a_wide_picture_goes_on_below() -> None:
    schedule = generate("1f1b", 4, 12)
    wide, narrow = grid(schedule, 1000), grid(schedule, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    blocks = [block.splitlines() for block in narrow.split("\n\n")]
    joined = ["".join(part.split("|")[1].ljust(1) for part in line).split() for line in zip(*blocks, strict=True)]
    assert joined == [line.split("|")[1].split() for line in wide.splitlines()]


def test_no_room_is_an_error() -> None:
    with pytest.raises(ArgumentError, match="width=5"):
        grid(generate("gpipe", 2, 2), 5)
