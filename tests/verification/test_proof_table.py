"""The table of benchmarks/proof is what the proof says today: of models that a pipeline would train wrongly if nobody
looked, and of some that only look like it, which are refused, in which words, which are seen, and which are right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scaffolding.ranks import server

PROOF = Path(__file__).parents[2] / "benchmarks" / "proof"
AT_ONCE = 3
ALWAYS = {
    *("LeavesATensor", "TellsAFlag", "TellsByCount", "ReadsAnAttributeOfALayer", "TakesTheLastOutput", "Follows"),
    *("Shows", "KeepsInAttribute", "AveragesInBackward", "CheckpointAverages", "CheckpointCounts", "ModelBackwardHook"),
    *("BlockBackwardHook", "AccumulationHook", "Reversible", "CountsForwards", "CountsElsewhere", "OnlyCounts"),
    *("DecidesByABlock", "CountsItself", "SharesACounter", "Tables", "BeginsInTheThirdStep", "DrawsInAFunction"),
    *("DrawsInAHook", "DrawsInACheckpoint", "SharedGenerator", "GeneratorOfTheModel", "SeedsItself", "ReadsAWeight"),
    *("ReadsAllWeights", "ReadsAWeightOfItsStage", "ReadsTheData", "ReadsAGlobalList", "ReadsLeftAttributes"),
    *("BinaryWeight", "Codebook", "ExchangesWeight", "Replaces", "NormalisesSome", "InGlobal", "CollectsInContext"),
    *("Decides", "Routed", "MixturesOfExperts", "CountsRowsItself", "GivesASet", "KeepsAList"),
    *("WritesABufferAtTheEnd", "Seeds", "Forks", "InSlotsOfAClass", "ScalesByPython", "ScalesByNumpy", "Recurrent"),
    *("DropsLayersByNumpy", "DropsLayersByPython", "BlocksOfPython", "BlocksOfNumpy", "Dropouts", "MadeInForward"),
    "Noisy",
}
"""Which every run of the tests looks at."""

ROWS = json.loads((PROOF / "results.json").read_text())["models"]
KINDS = list(dict.fromkeys(row["kind"] for row in ROWS))


def said(text: str) -> str:
    """Without the place of the checkout."""
    return re.sub(r"/[^ ]*/benchmarks/proof/", "", text)[:200]


@pytest.mark.parametrize("always", [True, pytest.param(False, marks=pytest.mark.long)], ids=["some", "others"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_says_what_the_table_says(kind: str, always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROOF)
    import apart
    import judged

    monkeypatch.setattr(apart, "server", server)  # the one from which ranks come

    rows = [row for row in ROWS if row["kind"] == kind and (row["name"] in ALWAYS) is always]
    found: list[Any] = []
    for first in range(0, len(rows), AT_ONCE):
        found += apart.run([(judged.proved, (row["name"], row["schedule"])) for row in rows[first : first + AT_ONCE]])
    for row, proof in zip(rows, found, strict=True):
        if "error" in proof:
            assert row["proof"] == ("refused" if proof["ours"] else "raises"), (row, proof)
            assert said(proof["error"]) == said(row["summary"])
        else:
            assert row["proof"] == proof["seen"], (row, proof)


def test_some_of_every_kind_are_always_looked_at() -> None:
    names = {row["name"]: row["kind"] for row in ROWS}
    assert names.keys() >= ALWAYS
    assert {names[name] for name in ALWAYS} == set(KINDS)


def test_planted_faults_are_seen_and_named_where_they_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(PROOF)
    import apart
    import judged

    monkeypatch.setattr(apart, "server", server)  # the one from which ranks come

    rows = json.loads((PROOF / "results.json").read_text())["faults"]
    assert len(rows) == 28
    for first in range(0, len(rows), AT_ONCE):
        some = rows[first : first + AT_ONCE]
        for row, found in zip(some, apart.run([(judged.planted, (row["name"],)) for row in some]), strict=True):
            assert (found.get("seen"), found.get("named")) == (row["seen"], row["named"]), (row, found)
