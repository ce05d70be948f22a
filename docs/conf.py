"""How the site is built: `make docs`. Figures, links to files and docstrings are handled by `_ext/`."""

from __future__ import annotations

import sys
from pathlib import Path

from sphinx.ext.autodoc.mock import MockFinder

import penstock

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "Penstock"
copyright = "The Penstock authors"
author = "The Penstock authors"
release = penstock.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "figures",
    "live",
    "formulas",
    "commands",
    "sources",
    "public",
]
exclude_patterns = ["_ext", "_templates", "pictures"]
nitpick_ignore_regex = [("py:.*", r".*")]  # types in signatures: only those of this reference have a page to link to
suppress_warnings = [
    "myst.header",
    "ref.python",  # an attribute that several classes have
]

myst_enable_extensions = ["colon_fence", "dollarmath", "deflist", "fieldlist"]
myst_heading_anchors = 4  # as GitHub makes them, so that links work there, too

highlight_language = "text"  # blocks without a language are commands and what they print

# Whatever is installed, and seconds faster. Not autodoc_mock_imports: autodoc also imports where that does not hold.
sys.meta_path.insert(0, MockFinder(["accelerate", "lightning", "transformers"]))
copybutton_prompt_text = "$ "  # a command is copied without its prompt, and without what it prints

autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures are long; Args say what each argument is
autodoc_class_signature = "mixed"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_math_renderer = "mathml"
html_theme = "furo"
html_title = f"Penstock {release}"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static"]
templates_path = ["_templates"]
_MOVED = {
    "guides/proving": "verification.html",
    "guides/watching": "monitoring.html",
    "guides/trouble": "troubleshooting.html",
    "guides/hosts": "multi-node.html",
    "guides/bad-network": "degraded-network.html",
}
html_context = {"moved": _MOVED}
html_additional_pages = dict.fromkeys(_MOVED, "moved.html")  # old addresses lead to the new ones
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_search_summary = False  # it would fetch pages, which browsers refuse to do from disk
html_show_sourcelink = False
html_copy_source = False
html_permalinks_icon = "#"
html_theme_options = {
    "sidebar_hide_name": False,
    "light_css_variables": {"color-brand-primary": "#0b5fa5", "color-brand-content": "#0b5fa5"},
    "dark_css_variables": {"color-brand-primary": "#6cb6ff", "color-brand-content": "#6cb6ff"},
}
