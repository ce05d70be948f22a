"""The scripts and styles of pages: as files for a server, or as one text for a page that needs no other file."""

from __future__ import annotations

import json
import re
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

STATIC = files("penstock.report.web").joinpath("static")
"""The folder of modules and style sheets; modules import each other by `./name.js`."""

_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./([\w.]+)";\n', re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|class|const|let) )", re.MULTILINE)


@cache
def asset(name: str) -> str:
    """The text of a file in `STATIC`."""
    return STATIC.joinpath(name).read_text(encoding="utf-8")


@cache
def bundle(name: str) -> str:
    """A module and all that it imports, as one module without imports. Names at the top of modules are unique."""
    return "".join(_EXPORT.sub("", _IMPORT.sub("", asset(each))) for each in _in_order(name, []))


def _in_order(name: str, found: list[str]) -> list[str]:
    """The modules that a module needs, each after those that it needs itself, and the module last."""
    for _, needed in _IMPORT.findall(asset(name)):
        if needed not in found:
            _in_order(needed, found)
    found.append(name)
    return found


def embedded(name: str, value: Any) -> Markup:
    """A value as JSON in an element of a page, by id. Nothing in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(f'<script type="application/json" id="{name}">{text}</script>')
