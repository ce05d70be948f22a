"""One of a thing is not called several."""

from __future__ import annotations

import pytest

from penstock._base.formatting import a, collapse_ranges, pluralize


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [
        (1, "microbatch", "1 microbatch"),
        (0, "microbatch", "0 microbatches"),
        (1, "stage", "1 stage"),
        (4096, "rank", "4,096 ranks"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
        (4, "process", "4 processes"),
    ],
)
def test_counted(number: int, what: str, text: str) -> None:
    assert pluralize(number, what) == text
    assert (a(what), a("int"), a("UserDict")) == (f"{'an' if what == 'entry' else 'a'} {what}", "an int", "a UserDict")


def test_names_that_count_up_are_one_range() -> None:
    names = [*("embed", "h.0", "h.1", "h.2", "h.4", "fc1", "fc2"), *(f"s.2.b.{n}" for n in (8, 9, 10))]
    names += ["h.3.mlp", "h.4.mlp", "x"]
    assert collapse_ranges(names) == ["embed", "h.0-2", "h.4", "fc1-2", "s.2.b.8-10", "h.3-4.mlp", "x"]
    assert collapse_ranges(["h.1", "h.0", "0", "1", ""]) == ["h.1", "h.0", "0-1", ""]
