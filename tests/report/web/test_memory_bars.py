"""A bar of memory shows the share of a limit; without a limit there is none, since the fullest would always be full."""

from __future__ import annotations

import re

import pytest

from penstock.report.web.contents import Contents, Held
from penstock.report.web.page import page


@pytest.mark.parametrize(
    ("limits", "bars"), [((None, None), []), ((8.0, None), ["50.000%"]), ((8.0, 2.0), ["50.000%", "100.000%"])]
)
def test_a_bar_is_the_share_of_the_limit(limits: tuple[float | None, ...], bars: list[str]) -> None:
    memory = tuple(Held(rank, 4.0, limit, "predicted") for rank, limit in enumerate(limits))
    text = page(Contents("a run", memory=memory))
    found = re.findall(r'<i class="(?:memory|over)" style="width: ([\d.]+%)">', text)
    assert found == bars
    assert ("peak of the limit" in text) is bool(bars)
