"""The table of benchmarks/proof is what the proof says today: of models that a pipeline would train wrongly if nobody
looked, and of some that only look like it, which are refused, in which words, which are seen, and which are right.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from scaffolding.patient import COMMAND_SECONDS, TEST_SECONDS
from scaffolding.ranks import server

pytestmark = pytest.mark.timeout(TEST_SECONDS)

PROOF = Path(__file__).parents[2] / "benchmarks" / "proof"
AT_ONCE = 3
ALWAYS = {
    *("LeavesATensor", "TellsByCount", "Recurrent", "KeepsInAttribute", "CheckpointCounts", "AccumulationHook"),
    *("CountsForwards", "CountsItself", "Tables", "BeginsInTheThirdStep", "DrawsInACheckpoint", "SharedGenerator"),
    *("ScalesByNumpy", "DropsLayersByPython", "DrawsOfAllKinds", "ReadsAllWeights", "ReadsLeftAttributes"),
    *("BinaryWeight", "Replaces", "NormalisesSome", "InGlobal", "InSlotsOfAClass", "Decides", "GivesASet"),
}
"""Which every run of the tests looks at: some of each kind."""

FAULTS = {
    *("a_gradient_is_dropped", "the_last_microbatch_is_lost", "targets_are_swapped", "a_receive_buffer_is_stale"),
    *("another_mask_when_run_again", "a_batch_norm_is_counted_twice", "a_tied_term_is_missing"),
    *("evaluation_runs_in_training_mode", "the_third_step_has_old_weights", "activations_are_a_little_off"),
    *("masks_repeat_in_every_microbatch", "drawn_numbers_are_frozen"),
}
"""The same of planted faults."""

ROWS = json.loads((PROOF / "results.json").read_text())["models"]
KINDS = list(dict.fromkeys(row["kind"] for row in ROWS))


def said(text: str) -> str:
    """Without the place of the checkout."""
    return re.sub(r"/[^ ]*/benchmarks/proof/", "", text)[:200]


def run(monkeypatch: pytest.MonkeyPatch, calls: list[tuple[str, tuple[str, ...]]]) -> list[Any]:
    """What functions of `judged` return, a few at once; each has as long as a loaded machine may take."""
    monkeypatch.syspath_prepend(PROOF)
    import apart
    import judged

    monkeypatch.setattr(apart, "server", server)  # the one from which ranks come
    found: list[Any] = []
    for first in range(0, len(calls), AT_ONCE):
        some = [(getattr(judged, name), args) for name, args in calls[first : first + AT_ONCE]]
        found += apart.run(some, COMMAND_SECONDS, together=False)
    return found


@pytest.mark.parametrize("always", [True, pytest.param(False, marks=pytest.mark.long)], ids=["some", "others"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_proof_says_what_the_table_says(kind: str, always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for row in ROWS if row["kind"] == kind and (row["name"] in ALWAYS) is always]
    found = run(monkeypatch, [("proved", (row["name"], row["schedule"])) for row in rows])
    for row, proof in zip(rows, found, strict=True):
        if "error" in proof:
            assert row["proof"] == ("refused" if proof.get("ours") else "raises"), (row, proof)
            assert said(proof["error"]) == said(row["summary"])
        else:
            assert row["proof"] == proof["seen"], (row, proof)


def test_some_of_every_kind_are_always_looked_at() -> None:
    names = {row["name"]: row["kind"] for row in ROWS}
    assert names.keys() >= ALWAYS
    assert {names[name] for name in ALWAYS} == set(KINDS)


@pytest.mark.parametrize("always", [True, pytest.param(False, marks=pytest.mark.long)], ids=["some", "others"])
def test_planted_faults_are_seen_and_named_where_they_begin(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every run of the tests looks at those of the last stage's sums, messages, random streams, modes and weights."""
    rows = json.loads((PROOF / "results.json").read_text())["faults"]
    assert {row["name"] for row in rows} >= FAULTS
    rows = [row for row in rows if (row["name"] in FAULTS) is always]
    found = run(monkeypatch, [("planted", (row["name"],)) for row in rows])
    for row, proof in zip(rows, found, strict=True):
        assert (proof.get("seen"), proof.get("named")) == (row["seen"], row["named"]), (row, proof)
