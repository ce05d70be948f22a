"""Prints `docs/support.md`."""

from support.page import page

print(page(), end="")
