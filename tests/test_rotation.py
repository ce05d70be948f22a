"""The parts of the long tests that CI runs in turn."""

from __future__ import annotations

from pathlib import Path

import pytest

from scaffolding.rotation import CPU_SECONDS, IN_ALL_ONLY, MAX, parts

ROOT = Path(__file__).parents[1]


def test_every_file_is_in_one_part_and_no_part_takes_too_long() -> None:
    found = parts(CPU_SECONDS, MAX)
    assert sorted(name for part in found for name in part) == sorted(CPU_SECONDS)
    assert all(sum(CPU_SECONDS[name] for name in part) <= MAX for part in found)
    with pytest.raises(ValueError, match="b takes 3 s, and a part 2 s at most"):
        parts({"a": 1, "b": 3}, 2)


def has_long_tests(path: Path) -> bool:
    text = path.read_text()
    return any(words in text for words in ("representatives(", "long_after(", "pytest.mark.long"))


def test_no_file_with_long_tests_is_forgotten() -> None:
    """Nor is one listed that has been moved, or has none any more."""
    files = {path.relative_to(ROOT).as_posix(): path for path in (ROOT / "tests").rglob("test_*.py")}
    own = Path(__file__).relative_to(ROOT).as_posix()
    found = {name for name, path in files.items() if name != own and has_long_tests(path)}
    assert found == {*CPU_SECONDS, *IN_ALL_ONLY}
    assert not CPU_SECONDS.keys() & IN_ALL_ONLY
