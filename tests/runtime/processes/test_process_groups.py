"""Which groups of two are made at once."""

from __future__ import annotations

from itertools import permutations

from hypothesis import given
from hypothesis import strategies as st

from penstock.runtime.processes.groups import Way, matchings


@given(st.sets(st.sampled_from(list(permutations(range(6), 2)))))
def test_no_rank_is_in_two_groups_at_once(ways: set[Way]) -> None:
    made = matchings(ways)
    assert sorted(way for matching in made for way in matching) == sorted(ways)
    for matching in made:
        ranks = [rank for way in matching for rank in way]
        assert len(ranks) == len(set(ranks))


def test_a_chain_takes_four_turns_however_long() -> None:
    for p in (3, 4, 9, 64):
        chain = {(a, b) for a, b in permutations(range(p), 2) if abs(a - b) == 1}
        assert len(matchings(chain)) == 4
