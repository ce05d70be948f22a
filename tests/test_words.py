"""One of a thing is not called several."""

from __future__ import annotations

import pytest

from penstock.words import counted


@pytest.mark.parametrize(
    ("number", "what", "text"),
    [
        (1, "microbatch", "1 microbatch"),
        (0, "microbatch", "0 microbatches"),
        (1, "stage", "1 stage"),
        (4096, "rank", "4,096 ranks"),
    ],
)
def test_counted(number: int, what: str, text: str) -> None:
    assert counted(number, what) == text
