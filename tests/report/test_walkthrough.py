"""The words of a walk-through against the schedule: every slot of every generator.

The facts are read back from the sentences. Where actions run comes from `grid`'s text; what they need is written down
here once more, by hand.
"""

from __future__ import annotations

import re

import pytest

from penstock.report import walkthrough
from penstock.schedule import Schedule, add_communication, add_sharding, generate, grid, schedule_specs

SIZES = ((1, 1), (2, 2), (4, 8), (4, 3))

_PIECE = r"microbatch (\d+) on stage (\d+)(?:, the copy of stage (\d+))?"
_OPS = {
    "runs the forward of": "F",
    "runs the backward of": "B",
    "computes the input gradient of": "I",
    "computes the weight gradient of": "W",
    "the forward of": "F",
    "the backward of": "B",
    "the input gradient of": "I",
    "the weight gradient of": "W",
}
_VERBS = "|".join(_OPS)
_WORKS = re.compile(
    rf"rank (\d+) ({_VERBS}) {_PIECE}, ((?:on|with|from) [^;]*)(?:; ({_VERBS}) {_PIECE} may run at .*)?"
)
_WAITS = re.compile(rf"rank (\d+) waits: ({_VERBS}) {_PIECE} needs (.*)")
_MISSING = re.compile(rf"({_VERBS}) {_PIECE}, which rank (\d+) runs in (this slot|slot \d+)")
_DONE = re.compile(r"rank (\d+) has finished: its last work was in slot (\d+)")


def named(op: str, microbatch: str, stage: str, copy: str | None, schedule: Schedule) -> str:
    """An action's text from the words for it."""
    depth = schedule.placement.depth
    assert copy == (None if int(stage) < depth else str(int(stage) % depth))
    return f"{stage}{_OPS[op]}{microbatch}"


def cells(schedule: Schedule) -> list[list[str]]:
    """What `grid` draws: each rank's slots, an action's text or a dot."""
    lines = [line.partition("|")[2].split() for line in grid(schedule, 10**6).splitlines()]
    if schedule.stages > schedule.ranks:
        return lines
    return [[cell if cell == "." else f"{rank}{cell}" for cell in line] for rank, line in enumerate(lines)]


def needed(action: str, schedule: Schedule, has: set[str]) -> set[str]:
    """What an action needs, by the rules of pipelining."""
    stage, op, number = re.fullmatch(r"(\d+)([FBIW])(\d+)", action).groups()  # type: ignore[union-attr]
    s, k, depth = int(stage), int(number), schedule.placement.depth
    if op == "W":
        return {f"{s}I{k}"}
    if op == "F":
        return {f"{s - 1}F{k}"} if s % depth else set()
    gradients = {f"{s + 1}{kind}{k}" for kind in "BI"} if s % depth != depth - 1 else set()
    return {f"{s}F{k}"} | (gradients & has)


def check_words(schedule: Schedule) -> None:
    drawn, walk = cells(schedule), walkthrough(schedule)
    place = {cell: (rank, slot) for rank, row in enumerate(drawn) for slot, cell in enumerate(row) if cell != "."}
    assert walk.slots == len(drawn[0])
    for slot in range(walk.slots):
        moments = walk.at(slot)
        assert [moment.rank for moment in moments] == list(range(schedule.ranks))
        busy = sum(row[slot] != "." for row in drawn)
        assert f"slot {slot} of {schedule.name}: {busy} of {schedule.ranks} rank" in walk.headline(slot)
        for rank, moment in enumerate(moments):
            assert moment.slot == slot
            text, cell = moment.text, drawn[rank][slot]
            if cell != ".":
                check_work(text, cell, rank, schedule, place)
                assert str(moment.action) == cell
            else:
                assert moment.action is None
                check_idle(text, rank, slot, drawn[rank], schedule, place)
            sources = {str(one.action): (one.rank, one.slot) for one in moment.needs}
            assert all(place[action] == where for action, where in sources.items())


def check_work(text: str, cell: str, rank: int, schedule: Schedule, place: dict[str, tuple[int, int]]) -> None:
    found = _WORKS.fullmatch(text)
    assert found is not None, text
    who, verb, *where, sources = found.groups()[:6]
    assert (int(who), named(verb, *where, schedule)) == (rank, cell)
    stage = int(cell.partition(cell.strip("0123456789"))[0])
    depth = schedule.placement.depth
    needs = needed(cell, schedule, set(place))
    expected = []
    for need in needs:
        at_rank, at = place[need]
        of_stage, op = re.fullmatch(r"(\d+)([FBIW])\d+", need).groups()  # type: ignore[union-attr]
        if int(of_stage) != stage:
            what = "output" if op == "F" else "gradient"
            mine = f"it made itself on stage {of_stage} in slot {at}"
            expected.append(
                f"with the {what} that {mine if at_rank == rank else f'rank {at_rank} sent at the end of slot {at}'}"
            )
        else:
            expected.append(
                {"I": "with what its input gradient left", "F": "with what its forward kept"}[op] + f" in slot {at}"
            )
    if "F" in cell and stage % depth == 0:
        expected.append("on its piece of the batch")
    if ("B" in cell or "I" in cell) and stage % depth == depth - 1:
        expected.append("from the loss")
    assert sorted(sources.split(" and ")) == sorted(expected), text


def check_idle(
    text: str, rank: int, slot: int, row: list[str], schedule: Schedule, place: dict[str, tuple[int, int]]
) -> None:
    later = [cell for cell in row[slot:] if cell != "."]
    if not later:
        found = _DONE.fullmatch(text)
        assert found is not None, text
        last = max(at for at, cell in enumerate(row) if cell != ".")
        assert (int(found[1]), int(found[2])) == (rank, last)
        return
    found = _WAITS.fullmatch(text)
    assert found is not None, text
    who, verb, *where, reasons = found.groups()
    assert (int(who), named(verb, *where, schedule)) == (rank, later[0])
    said = {}
    for verb, *where, by, when in _MISSING.findall(reasons):
        blank = [part or None for part in where]
        said[named(verb, *blank, schedule)] = (int(by), slot if when == "this slot" else int(when.split()[1]))
    missing = {need for need in needed(later[0], schedule, set(place)) if place[need][1] >= slot}
    assert said == {need: place[need] for need in missing}
    assert missing, f"{text}: idle without a reason"


@pytest.mark.parametrize("ranks_microbatches", SIZES, ids=lambda size: f"p{size[0]}m{size[1]}")
@pytest.mark.parametrize("name", [one.name for one in schedule_specs()])
def test_words_are_the_schedules(name: str, ranks_microbatches: tuple[int, int]) -> None:
    ranks, microbatches = ranks_microbatches
    entry = next(one for one in schedule_specs() if one.name == name)
    if "bidirectional" in entry.placement:
        ranks, microbatches = ranks + ranks % 2, microbatches + microbatches % 2
    check_words(generate(name, ranks, microbatches))


@pytest.mark.parametrize("name", ["interleaved-1f1b", "hanayo"])
def test_more_chunks(name: str) -> None:
    check_words(generate(name, 3, 6, stages_per_rank=4))


def test_messages_and_gathers_make_no_difference() -> None:
    plain = generate("1f1b", 3, 4)
    for schedule in (add_communication(plain), add_sharding(plain, {0, 1, 2}, 1)):
        assert walkthrough(schedule).ranks == walkthrough(plain).ranks


def test_overlaps_are_said() -> None:
    texts = [moment.text for moments in walkthrough(generate("dualpipe", 4, 8)).ranks for moment in moments]
    assert any("may run at the same time" in text for text in texts)
    assert not any("at the same time" in m.text for ms in walkthrough(generate("zb-v", 4, 8)).ranks for m in ms)
