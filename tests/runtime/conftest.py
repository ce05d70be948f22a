import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))  # for `models`


@pytest.fixture(autouse=True)
def _one_thread(one_thread: None) -> None:
    """Every test here."""
