"""Set-ups that several commands' tests share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    """Writes a file and gives its path: text as it stands, all else as JSON."""

    def write(content: Any, name: str = "costs.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write
