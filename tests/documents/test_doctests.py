"""The examples in docstrings give what they show."""

import doctest
from importlib import import_module

import pytest
from blocks import ROOT

SOURCE = ROOT / "src"
EXAMPLES = sorted(path for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.relative_to(SOURCE).as_posix())
def test_examples(path) -> None:
    name = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
    failed, tried = doctest.testmod(import_module(name))
    assert failed == 0
    assert tried > 0
