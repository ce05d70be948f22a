"""Real ranks with batches that change from step to step: other sizes, other lengths, fewer rows than microbatches."""

from __future__ import annotations

from typing import Any

import changing_jobs as jobs
import pytest
import torch

from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("schedule", "p", "transport"), long_after(1, ("zb-h1", 2, "distributed"), ("interleaved-1f1b", 4, "auto"))
)
def test_traps_5_7_12_21_batches_that_change_have_the_bits_of_one_device(
    schedule: str, p: int, transport: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    options = {"schedule": schedule, "transport": transport, "stages_per_rank": chunks}
    assert ranks.run(jobs.train, max(4, p * chunks), options) == [[]] * p


def test_microbatches_of_lengths_of_their_own(ranks3: Ranks) -> None:
    assert ranks3.run(jobs.buckets) == [[]] * 3


def test_lists_with_one_entry_per_row_are_cut_on_both_ends(ranks2: Ranks) -> None:
    for losses in ranks2.run(jobs.listed):
        for loss, expected in losses:
            assert loss == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("schedule", "places"), [("zb-h1", [0]), ("chimera", [0, 1])])
def test_inputs_get_their_gradients_where_they_live(ranks2: Ranks, schedule: str, places: list[int]) -> None:
    found = ranks2.run(jobs.input_gradients, schedule)
    assert [rank for rank, (has, *_) in enumerate(found) if has] == places
    for has, gradient, by_hand, verified in found:
        assert verified
        assert torch.equal(gradient, by_hand) if has else gradient is None


@pytest.mark.parametrize(
    ("p", "schedule", "here"),
    [(3, "1f1b", {True: [2], "all": [0, 1, 2], 0: [0]}), (2, "chimera", {"all": [0, 1], 0: [0]})],
)
def test_trap_7_the_whole_output_is_in_order_of_microbatch_where_it_was_asked_for(
    p: int, schedule: str, here: dict[Any, list[int]], request: pytest.FixtureRequest
) -> None:
    """Of two copies, the first rank has the outputs of the last microbatches."""
    found = request.getfixturevalue(f"ranks{p}").run(jobs.predict, [*here], schedule)
    torch.manual_seed(0)
    model = jobs.Words(2)
    expected = torch.cat([model(part.clone()) for part in torch.split(jobs.words(7, 5)[0], [2, 2, 2, 1])])
    for which, ranks in enumerate(here.values()):
        assert [rank for rank, outputs in enumerate(found) if outputs[which] is not None] == ranks
        assert all(torch.equal(found[rank][which], expected) for rank in ranks)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("evaluate", r"rank 0 runs a training step, this rank \(1\) an evaluation; every rank must make the same"),
        ("outputs", r"rank 0 runs with outputs=True or False, this rank \(1\) with outputs='all'"),
        ("mode", r"this rank \(1\) with different modes, requires_grad flags or autocast"),
        ("target", r"target has 5 rows \(shape \[5, 5\]\); expected 6, as the inputs have"),
    ],
)
def test_trap_23_ranks_that_do_not_make_the_same_call_are_told(ranks2: Ranks, what: str, words: str) -> None:
    with pytest.raises(RanksError, match=words):
        ranks2.run(jobs.disagree, what)


def test_kinds_that_are_forgotten_leave_nothing_behind(ranks2: Ranks) -> None:
    kept = 6  # rather than CACHED_SCHEDULES
    for jobs_kept, lanes in ranks2.run(jobs.many_kinds, kept, kept + 5):
        assert jobs_kept == kept
        assert lanes == 2 * kept  # one there and one back


def test_lengths_between_those_recorded_have_the_bits_of_one_device(ranks2: Ranks) -> None:
    options = {"schedule": "1f1b", "transport": "distributed", "balance": "parameters"}
    found = ranks2.run(jobs.lengths, options)
    assert found == [([], 11)] * 2  # first for the weights, then 6, 7, 8, 13 and 16 in training and in evaluation


def test_an_average_over_parameters_of_two_ranks_is_refused_in_the_script_and_kept_in_the_forward(
    ranks2: Ranks,
) -> None:
    """Torch takes `mine.add_(theirs)`, where theirs are on the meta device, and does nothing."""
    said = [text for text in ranks2.run(jobs.average, False) if text]
    assert len(said) == 1
    assert "has no values on this rank" in said[0]
    assert ranks2.run(jobs.average, True) == ["", ""]


def test_outputs_of_any_dtype_and_layout_reach_all_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(jobs.odd_outputs) == [[], []]
