"""Who may use whose private parts: a package its own alone, and only `compat` the part of torch that moves most."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

HOME = Path(penstock.__file__).parent


def imported(file: Path) -> Iterator[str]:
    """What a file imports, by full name."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def trespasses(module: str, name: str) -> bool:
    """Whether a module of ours imports what is private to another package of ours, or to torch's fake tensors."""
    if name.startswith(("torch._subclasses", "torch.utils._pytree", "torch._C")):
        return module != "penstock.compat"
    parts = name.split(".")
    private = next((index for index, part in enumerate(parts) if part.startswith("_") and part[:2] != "__"), None)
    return parts[0] == "penstock" and private is not None and module.split(".")[:private] != parts[:private]


def test_no_package_has_a_secret_door() -> None:
    files = {file: ".".join(("penstock", *file.relative_to(HOME).with_suffix("").parts)) for file in HOME.rglob("*.py")}
    assert len(files) > 300
    assert [(module, n) for file, module in files.items() for n in imported(file) if trespasses(module, n)] == []


def test_a_secret_door_is_seen() -> None:
    assert trespasses("penstock.runtime.step.bound_schedules", "penstock.partition._compat.flatten")
    assert trespasses("penstock.runtime.step.bound_schedules", "penstock.partition.trees._Walk")
    assert not trespasses("penstock.cli.run", "penstock.cli._traffic.read")
    assert trespasses("penstock.partition.values.memory", "torch.utils._pytree.tree_flatten")
