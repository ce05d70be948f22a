"""The terminal, the report and the studio list the same advice, in the same order, in the same words."""

from __future__ import annotations

import json
from pathlib import Path

from command_line import as_json, output

from penstock.report.studio.open_view import open_view
from penstock.report.web.sources import load_contents
from penstock.schedule import generate
from penstock.simulate import LinkCost, StageCost, simulate


def test_every_list_of_advice_is_the_same(tmp_path: Path) -> None:
    costs = [StageCost(one, one, one) for one in (0.01, 0.01, 0.015, 0.01)]
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(simulate(generate("zb-h1", 4, 8), costs, LinkCost(0.0001)).to_dict()))
    listed = [(one["claim"], one["text"], one["note"]) for one in as_json("explain", str(path))["changes"]]
    assert {claim.startswith("at most") for claim, *_ in listed} == {False, True}
    assert [(one.claim, one.text, one.note) for one in load_contents([path]).improvements] == listed
    studio = open_view(path, path.name)["explanation"]["changes"]
    assert [(one["claim"], one["text"], one["note"]) for one in studio] == listed
    said = " ".join(output("explain", str(path), columns=400).split())
    places = [said.index(" ".join(f"{claim} {text}".split())) for claim, text, _ in listed]
    assert places == sorted(places)
    assert "no significant improvement" not in said
