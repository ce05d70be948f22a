"""The full report of what is in the runs folder, as `penstock report` writes it, behind an address."""

from __future__ import annotations

import hashlib
from base64 import b64encode
from pathlib import Path

from penstock.web.page import page
from penstock.web.sources import shown


def report(path: Path, step: int | None = None) -> str:
    """The page of `penstock report`. Raises ArgumentError if there is nothing to report, or no such step."""
    return page(shown([path], step))


def policy(text: str) -> str:
    """What a report may do: run its own script with its own styles, by their hashes, and load nothing at all.

    Its styles are the first in the page and its script the last, so that nothing in between, which came from a run, is
    ever among them. Widths of bars are attributes of elements, which no hash covers.
    """
    style = text.partition("<style>")[2].partition("</style>")[0]
    script = text.rpartition('<script type="module">')[2].rpartition("</script>")[0]
    return (
        f"default-src 'none'; script-src {_hashed(script)}; style-src-elem {_hashed(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )


def _hashed(content: str) -> str:
    return f"'sha256-{b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
