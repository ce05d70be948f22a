"""What is wrong on one rank alone is in every rank's report; of a tie, too, whose other copy is as it should be."""

from __future__ import annotations

import pytest
import verify_jobs

from scaffolding.ranks import Ranks

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("task", "what", "row"),
    [
        ("tied_gpt", "no gradient", ("gradient", "wte.weight", "missing", 1)),
        ("convnet", "buffer", ("buffer", "norm.running_mean", "different", 1)),
    ],
)
def test_what_one_rank_has_wrong_is_in_every_report(
    ranks2: Ranks, task: str, what: str, row: tuple[str, str, str, int]
) -> None:
    seen = ranks2.run(verify_jobs.verify, task, what, row[1])
    assert seen[0] == seen[1], "each rank has the same report"
    assert not seen[0].ok
    in_steps = [wrong for wrong in seen[0].wrong if not wrong[1].endswith(" in evaluation")]
    assert in_steps == [row]
    assert (len(seen[0].wrong) > 1) == (what == "buffer"), "an evaluation after the second step reads the buffer"
    assert f"the first is {row[0]} {row[1]} on stage" in seen[0].summary
