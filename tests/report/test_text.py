"""Tables from columns."""

from __future__ import annotations

import io

from rich.console import Console

from penstock.report.text import print_columns


def printed(columns: dict[str, list[object]], width: int = 80) -> list[str]:
    console = Console(file=(file := io.StringIO()), width=width)
    print_columns(console, columns)
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_a_column_of_which_nothing_is_known_is_left_out() -> None:
    assert printed({"rank": [0, 1], "limit": [None, None], "step": [None, 7]}) == [
        "rank  step",
        "0        -",
        "1        7",
    ]


def test_cells_are_text_and_never_cut_off() -> None:
    assert printed({"name": ["layers[0]", "[bold]x"]}, width=4) == ["name", "layers[0]", "[bold]x"]
