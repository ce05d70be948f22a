"""The decorator that compiles the switch's inner loop."""

from __future__ import annotations

from pathlib import Path

from penstock.compiled import compiler

compiled = compiler((*sorted(Path(__file__).parent.glob("*.py")), Path(__file__).parents[1] / "model.py"))
