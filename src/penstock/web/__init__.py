"""Pages: the timeline that reports and the studio show, the data that it draws, and the report of a run.

`static/` holds plain modules of JavaScript and style sheets, which need no build; Python makes all numbers that they
show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.lazy import face

if TYPE_CHECKING:
    from penstock.web.assets import STATIC as STATIC
    from penstock.web.assets import bundle as bundle
    from penstock.web.page_data import band as band
    from penstock.web.page_data import curve as curve
    from penstock.web.page_data import timeline_data as timeline_data

_HOMES = {
    "STATIC": "assets",
    "bundle": "assets",
    "band": "page_data",
    "curve": "page_data",
    "timeline_data": "page_data",
}

__all__ = [*_HOMES]  # noqa: PLE0604  (one list of names, not two)

__getattr__, __dir__ = face(__name__, _HOMES)
