"""The rows of `benchmarks/correctness` run, and Penstock is right in each."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks" / "correctness"
pytestmark = [pytest.mark.long, pytest.mark.distributed]


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"correctness_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["tied", "evaluated", "normed", "uneven", "masked"])
def test_penstock_is_right_where_torch_is_not(name: str) -> None:
    row = load("rows").TABLE[name]
    bench = load("bench")
    assert bench.try_one(name, "penstock").startswith(row.right)
    assert not bench.try_one(name, "torch").startswith(row.right)


@pytest.mark.parametrize("name", ["few", "structured", "in_place", "bare"])
def test_penstock_runs_what_torch_refuses(name: str) -> None:
    bench = load("bench")
    assert bench.try_one(name, "penstock") == "runs"
    assert "raises" in bench.try_one(name, "torch")
