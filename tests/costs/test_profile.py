"""Profiles go to JSON and back; what is not one is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import ArgumentError
from penstock.costs import Profile, UnitCost, read_profile

NUMBER = st.floats(0, 1e9)
SIZE = st.integers(0, 10**12)
UNITS = st.lists(
    st.builds(UnitCost, st.text(min_size=1), NUMBER, NUMBER, NUMBER, *[SIZE] * 6, NUMBER),
    min_size=1,
    max_size=4,
    unique_by=lambda unit: unit.name,
)


@given(UNITS, st.dictionaries(st.text(min_size=1), st.lists(st.integers(0, 99)).map(tuple), max_size=3))
def test_json_and_back(units: list[UnitCost], parameters: dict[str, tuple[int, ...]]) -> None:
    profile = Profile(tuple(units), "cpu", "float32", parameters, opened=("a",), notes=("n",), runs=3)
    assert Profile.from_dict(json.loads(json.dumps(profile.to_dict()))) == profile


GOOD: dict[str, Any] = Profile((UnitCost("a", 1.0, 2.0, 3.0),), "cpu", "float32", {"a.weight": (2, 3)}).to_dict()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "expected a profile of version 1, not of 2"),
        ({"version": 2, "choice": {}}, "this is a plan; expected a profile"),
        ({"units": []}, "units: expected at least one"),
        ({"units": [{"name": "a"}]}, r"units\[0\].forward_seconds is missing"),
        ({"units": [{**GOOD["units"][0], "weight": 1}]}, r"units\[0\].weight is unknown to this version"),
        ({"units": [{**GOOD["units"][0], "forward_seconds": -1}]}, "'a': forward_seconds=-1.0; expected a number"),
        ({"units": GOOD["units"] * 2}, "with unique names, not 'a', 'a'"),
        ({"parameters": {"b.weight": [2, 3]}}, "its parameters do not match its identity"),
        ({"source": "guess"}, "source='guess': expected 'measured' or 'estimate'"),
        ({"speed": 3}, "speed is unknown to this version"),
        (
            {"units": [{**GOOD["units"][0], "forward_seconds": "1"}]},
            r"units\[0\].forward_seconds='1': expected a valid num",
        ),
        ({"units": [{**GOOD["units"][0], "recompute_seconds": -1}]}, "'a': recompute_seconds=-1.0; expected a number"),
        ({"parameters": {"a.weight": ["2"]}}, r"parameters.a.weight\[0\]='2': expected a valid integer"),
        ({"others": [{"rows": 0, "units": GOOD["units"]}]}, r"rows: expected distinct sizes >= 1.*\[0, 0\]"),
        ({"rows": 1, "others": [{"rows": 2, "units": [{**GOOD["units"][0], "name": "b"}]}]}, "have different units"),
        ({"links": [{"source": 0, "target": 1, "latency_seconds": -1}]}, "rank 0 to rank 1: latency_seconds=-1"),
    ],
)
def test_what_is_no_profile_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "profile.json").write_text(json.dumps({**GOOD, **change}))
    with pytest.raises(ArgumentError, match=words):
        read_profile(tmp_path / "profile.json")


def test_a_file_that_is_missing_or_no_json(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"profile '.*none.json' cannot be read: No such file"):
        read_profile(tmp_path / "none.json")
    whole = json.dumps(GOOD)
    for text in ("{", whole[: len(whole) // 2], "", "[" * 100_000):
        (tmp_path / "text.json").write_text(text)
        with pytest.raises(ArgumentError, match=r"text.json' is not JSON"):
            read_profile(tmp_path / "text.json")


def test_a_file_of_one_size_that_does_not_say_its_rows(tmp_path: Path) -> None:
    """As files were before they had several."""
    later = {"rows", "others", "links"}
    old = {name: value for name, value in GOOD.items() if name not in later}
    old["units"] = [{name: value for name, value in GOOD["units"][0].items() if name != "recompute_seconds"}]
    (tmp_path / "old.json").write_text(json.dumps(old))
    found = read_profile(tmp_path / "old.json")
    assert (found.rows, found.each_size) == (0, (found,))
    assert found.units[0].again_seconds == found.units[0].forward_seconds
