"""What an extra brings is asked for before it is needed, by the name of the extra."""

from __future__ import annotations

import sys

import pytest
from command_line import refusal

from penstock._base.errors import MissingExtraError
from penstock.network.fabric.statistics import trend


@pytest.mark.parametrize("package", ["jinja2", "scipy"])
def test_the_command_asks_for_its_extra_before_any_host_starts(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert f"penstock fabric: this needs {package}, pip install 'penstock[fabric]'" in refusal(
        "fabric", "--preset", "mlp"
    )


def test_statistics_name_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(
        MissingExtraError, match=r"the statistics of a run: this needs scipy, pip install 'penstock\[fabric\]'"
    ):
        trend([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
