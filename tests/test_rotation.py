"""The parts of the long tests that CI runs in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaffolding.rotation import CPU_SECONDS, MOST, parts

ROOT = Path(__file__).parents[1]


def test_every_file_is_in_one_part_and_no_part_takes_too_long() -> None:
    found = parts(CPU_SECONDS, MOST)
    assert sorted(name for part in found for name in part) == sorted(CPU_SECONDS)
    assert all(sum(CPU_SECONDS[name] for name in part) <= MOST for part in found)
    with pytest.raises(ValueError, match="b takes 3 s, and a part 2 s at most"):
        parts({"a": 1, "b": 3}, 2)


@pytest.mark.parametrize("name", CPU_SECONDS)
def test_the_file_has_long_tests(name: str) -> None:
    """That of a file that has been moved, or has none any more, is missed."""
    text = (ROOT / name).read_text()
    assert "representatives(" in text or "pytest.mark.long" in text
