"""Set-ups that several commands' tests share."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from penstock.pipe import profiling


@pytest.fixture(scope="package", autouse=True)
def _quick_updates() -> Iterator[None]:
    """Each profile times an update of AdamW, which takes half a second with as many values as a figure needs."""
    with mock.patch.multiple(profiling, FEWER_VALUES=2**15, MORE_VALUES=2**16):
        yield


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a file and gives its path: text as it stands, all else as JSON."""

    def write(content: Any, name: str = "costs.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write
