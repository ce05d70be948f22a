"""Links from a page to a file outside docs/ (an example, a benchmark's README): the site takes a copy of the file.

In the sources they are ordinary relative links, which work on GitHub.
"""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx

_LINK = re.compile(r"\]\((?=\.\.?/)([^)#\s]+)\)")


def copy_what_lies_outside(app: Sphinx, name: str, source: list[str]) -> None:
    page = Path(app.srcdir, name).parent

    def as_download(link: re.Match[str]) -> str:
        inside = (page / link[1]).resolve().is_relative_to(app.srcdir)
        return link[0] if inside else f"](path:{link[1]})"

    source[0] = _LINK.sub(as_download, source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", copy_what_lies_outside)
    return {"parallel_read_safe": True}
