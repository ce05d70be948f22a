"""Prints the documentation of the zoo: `PYTHONPATH=tests python -m zoo > docs/zoo.md`."""

from zoo.matrix import page

print(page())
