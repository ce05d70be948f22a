"""`penstock schedules` lists every generator with its rules and formulas."""

from __future__ import annotations

import re

import pytest
from command_line import as_json, output

from penstock.cli.schedules import formula
from penstock.schedule import schedule_specs


def test_json_has_every_schedule_with_rules_and_formulas() -> None:
    listed = as_json("schedules")
    assert [entry["name"] for entry in listed] == [entry.name for entry in schedule_specs()]
    by_name = {entry["name"]: entry for entry in listed}
    assert by_name["zb-v"] | {"rule": ""} == {
        "name": "zb-v",
        "aliases": [],
        "rule": "",
        "placement": "V",
        "chunks": 2,
        "splits_backward": True,
        "rules": [
            {"argument": "stages_per_rank", "text": "exactly 2 stages per rank, placed as a V"},
        ],
        "memory": "min(p, m)",
        "idle": "0 if F == I == W else None",
        "bubble": "0",
    }
    assert by_name["gpipe"]["idle"] == "(p - 1)*(F + I + W)/v"
    assert by_name["hanayo"]["idle"] is None
    assert formula("(p/2 - 1)*(F + 2*I - W) if F == I else None") == "(p/2-1)(F+2I-W) if F=I"
    assert by_name["gpipe"]["aliases"] == ["afab"]
    assert "all forwards, then all backwards; also called afab" in " ".join(output("schedules", columns=120).split())


@pytest.mark.parametrize("columns", [80, 120])
def test_table_has_every_word_and_fits(columns: int) -> None:
    text = output("schedules", columns=columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    words = " ".join(text.split())
    for entry in schedule_specs():
        rows = re.findall(rf"^{re.escape(entry.name)} .*", text, re.MULTILINE)
        assert len(rows) == 2  # what it does, and what to expect of it
        assert all(formula(one) in rows[1] for one in (entry.memory, entry.idle, entry.bubble))
        assert f"{entry.chunks} {entry.placement} " in rows[0]
    if columns == 120:
        assert "1F1B with split backwards; weight gradients r microbatches late; needs exactly 1 stage" in words
