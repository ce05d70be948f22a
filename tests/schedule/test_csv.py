from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given

from penstock._base.errors import ArgumentError, ScheduleError
from penstock.schedule import (
    Action,
    Format,
    Op,
    Placement,
    Row,
    Schedule,
    add_communication,
    check,
    drop_communication,
    from_csv,
    generate,
    read_csv,
    reduce_ties,
    split_backward,
    to_csv,
    write_csv,
)
from scaffolding.some_schedules import arbitrary, generated

ONLY: Format = "compute_only"
COMMS: Format = "compute_comms"


def without(schedule: Schedule, *ops: Op) -> Schedule:
    return schedule.with_rows(
        [[i for i in row.items() if not {p.op for p in i.parts} & {*ops}] for row in schedule.rows]
    )


def last_forwards(schedule: Schedule) -> list[int]:
    last = schedule.stages - 1
    return [a.microbatch or 0 for row in schedule.rows for a in row if a.op is Op.F and a.stage == last]


# -- there and back ---------------------------------------------------------------------------------------------------


@given(generated(max_microbatches=8).filter(lambda schedule: schedule.placement.pipelines == 1))
def test_computations_and_messages_and_back_are_the_same(schedule: Schedule) -> None:
    for one in (schedule, split_backward(schedule)):
        assert from_csv(to_csv(one), schedule.name) == one
    complete = from_csv(to_csv(schedule, COMMS), schedule.name)
    assert without(complete, Op.REDUCE_GRAD) == add_communication(schedule)
    assert from_csv(to_csv(complete, COMMS), schedule.name) == complete
    assert to_csv(complete) == to_csv(schedule)


@given(arbitrary())
def test_any_placement_and_order_comes_back(schedule: Schedule) -> None:
    if last_forwards(schedule) != sorted(last_forwards(schedule)):
        with pytest.raises(ScheduleError, match=r"has F\d before F\d"):
            to_csv(schedule)
        return
    assert from_csv(to_csv(schedule), schedule.name) == schedule
    complete = from_csv(to_csv(schedule, COMMS), schedule.name)
    assert drop_communication(without(complete, Op.REDUCE_GRAD)) == schedule
    assert not [violation for violation in check(complete) if violation.fatal]


def test_overlaps_and_sharding_come_back() -> None:
    row = Row.parse("0UNSHARD 0F0 (0F1;0B0)OVERLAP_F_B 0RESHARD 0B1 0REDUCE_GRAD")
    schedule = Schedule("x", Placement.loop(1), 2, [row])
    assert from_csv(to_csv(schedule, COMMS), "x") == schedule
    assert to_csv(schedule) == "0F0,(0F1;0B0)OVERLAP_F_B,0B1\r\n"
    with pytest.raises(ArgumentError, match="expected 'compute_only' or 'compute_comms'"):
        to_csv(schedule, "compute")  # type: ignore[arg-type]


def test_what_is_written_is_what_torch_writes() -> None:
    schedule = generate("1f1b", 2, 2)
    assert to_csv(schedule) == "0F0,0F1,0B0,0B1\r\n1F0,1B0,1F1,1B1\r\n"
    first, second = csv.reader(io.StringIO(to_csv(schedule, COMMS)))
    # Torch divides gradients in REDUCE_GRAD, and adds none itself to this format. The neighbor's gradient goes first.
    assert first[-2:] == ["0B1", "0REDUCE_GRAD"]
    assert second[-3:] == ["1B1", "1SEND_B1", "1REDUCE_GRAD"]
    assert [text for text in first if "SEND" not in text and "RECV" not in text][:-1] == ["0F0", "0F1", "0B0", "0B1"]


def test_what_spreadsheets_write_is_read_and_not_judged(tmp_path: Path) -> None:
    """Their mark, bubbles, ragged rows, and what is no legal schedule."""
    (tmp_path / "x.csv").write_bytes(b"\xef\xbb\xbf0F0,,0B0, ,\n,1F0,1B0\n")
    assert read_csv(tmp_path / "x.csv", "1f1b") == generate("1f1b", 2, 1)
    schedule = from_csv("0B0,0F0,0F0,0F2\n")
    assert schedule.microbatches == 3
    assert {violation.kind for violation in check(schedule)} >= {"repeated", "order", "missing"}


# -- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [ONLY, COMMS])
def test_files_by_path_or_open(tmp_path: Path, format: Format) -> None:
    schedule = generate("gpipe", 2, 3, 2)
    write_csv(schedule, tmp_path / "a.b.csv", format)
    with (tmp_path / "open").open("w", newline="") as file:
        write_csv(schedule, file, format)
    assert (tmp_path / "open").read_bytes() == (tmp_path / "a.b.csv").read_bytes() == to_csv(schedule, format).encode()
    assert read_csv(str(tmp_path / "a.b.csv")) == from_csv(to_csv(schedule, format), "a.b")
    with (tmp_path / "open").open(newline="") as file:
        assert read_csv(file, "gpipe") == from_csv(to_csv(schedule, format), "gpipe")


@pytest.mark.parametrize("by_path", [True, False])
def test_what_is_no_text_is_refused(tmp_path: Path, by_path: bool) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"0F0,0B0\r\n1F0,1B\xff0,1F1\r\n")
    with path.open(encoding="utf-8", newline="") as file:
        with pytest.raises(ScheduleError, match=r"row 2, column 2, b'1B\\xff0': the text is not in utf-8"):
            read_csv(path if by_path else file)


# -- what cannot be read ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        ("", "row 1, column 1, ''", "empty"),
        ("0F0,0Q0\n", "row 1, column 2, '0Q0'", "expected stage, op and microbatch"),
        ("0F0,,0B\n", "row 1, column 3, '0B'", "expected stage, op and microbatch"),
        ("0F0,0B0\n1F0,(1F1)OVERLAP_F_B\n", "row 2, column 2, '(1F1)OVERLAP_F_B'", "expected"),
        ("0F0,0RECV_F0\n", "row 1, column 2, '0RECV_F0'", "name the other stage"),
        ("0F0,0SEND_F0>2\n", "row 1, column 2, '0SEND_F0>2'", "expected"),
        ("0F0,0B0,0REDUCE_GRAD0\n", "row 1, column 3, '0REDUCE_GRAD0'", "expected"),
        ("0F0,0B12345678901\n", "row 1, column 2, '0B12345678901'", "expected"),
        ("0F0,0B0\n\n1F0,1B0\n", "row 2, column 1, ''", "rank 1 has no actions"),
        ("0F0,0B0\n1F0,0B1\n", "row 2, column 2, '0B1'", "two ranks: row 1, column 1 has 0F0"),
        ("0F0,(1F0;0B0)OVERLAP_F_B\n1B0\n", "row 2, column 1, '1B0'", "two ranks: row 1, column 2"),
        ("0F0,1UNSHARD,0B0\n", "row 1, column 2, '1UNSHARD'", "no rank computes stage 1"),
        ("0F0,0B0\n2F0,2B0\n", "row 2, column 1, '2F0'", "no rank computes stage 1"),
        ('0F0,"0B0\n1F0,1B0\n', "row 1, column 2, '0B0\\n1F0,1B0\\n'", "expected"),
        ("0F0,0B0\n" + "1" * 200_000 + "\n", "row 2, column 1, '11111", "not CSV"),
    ],
)  # fmt: skip
def test_an_error_has_row_column_and_text(text: str, where: str, why: str) -> None:
    with pytest.raises(ScheduleError) as caught:
        from_csv(text)
    assert str(caught.value).startswith(where), caught.value
    assert why in str(caught.value)
    assert len(str(caught.value)) < 300


def test_ops_are_dropped_only_if_asked_for() -> None:
    text = "0UNSHARD,0F0,0RESHARD,0UNSHARD,0B0,0REDUCE_GRAD,0RESHARD\n"
    assert str(from_csv(text).rows[0]) == "0UNSHARD 0F0 0RESHARD 0UNSHARD 0B0 0REDUCE_GRAD 0RESHARD"
    dropped = from_csv(text, drop=(Op.UNSHARD, Op.RESHARD))
    assert str(dropped.rows[0]) == "0F0 0B0 0REDUCE_GRAD"
    assert check(dropped) == []
    with pytest.raises(ArgumentError, match=r"drop=\['B'\]"):
        from_csv(text, drop=(Op.UNSHARD, Op.B))


# -- what cannot be written -------------------------------------------------------------------------------------------

TWO = generate("gpipe", 2, 1)


@pytest.mark.parametrize("format", [ONLY, COMMS])
@pytest.mark.parametrize(
    ("schedule", "why"),
    [
        (Schedule("x", Placement(1, (0, 0), 2), 2, [Row.parse("0F0 0B0 1F1 1B1")]), "2 pipelines"),
        (
            Schedule("x", Placement.loop(3), 1, [Row.parse("0F0 0SEND_F0>2"), Row.parse("1F0"), Row.parse("2F0")]),
            "rank 0 has 0SEND_F0>2, and torch's messages go between neighboring stages only",
        ),
        (reduce_ties(TWO, [(0, 1)]), "rank 0 has 0REDUCE_GRAD0, and torch does not support tied stages"),
        (Schedule("x", Placement.loop(1), 3, [Row.parse("0F0 0F1 0B0 0B1")]), "read as 2 microbatches"),
        (Schedule("x", Placement.loop(1), 2, [Row.parse("0F1 0F0 0B0 0B1")]), "stage 0 has F1 before F0"),
        (Schedule("x", Placement.loop(1), 1, [[Action(0, Op.F, 10**9)]]), "rank 0 has 0F1000000000"),
    ],
    ids=str,
)  # fmt: skip
def test_what_torch_cannot_express_is_refused(schedule: Schedule, why: str, format: Format) -> None:
    with pytest.raises(ScheduleError, match=why):
        to_csv(schedule, format)
    assert Schedule.parse(str(schedule)) == schedule  # as the error says


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        (("0F0 0B0", ""), "row 2, column 1, ''"),
        (("0F0 1F0", "0B0 1B0"), "two ranks"),
        (("1F0 1B0", "0F0 0B0"), "read as 1 microbatches, stages on ranks 1 0, but has 1, on 0 1"),
    ],
)
def test_a_placement_that_the_file_would_not_tell_is_refused(rows: tuple[str, ...], why: str) -> None:
    with pytest.raises(ScheduleError, match=why):
        to_csv(TWO.with_rows(map(Row.parse, rows)))
