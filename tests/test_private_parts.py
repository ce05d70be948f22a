"""Who may use whose private parts: a package its own alone, and only COMPAT those of torch that may move."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import penstock

HOME = Path(penstock.__file__).parent

COMPAT = {"_base/compat.py", "_base/compat_compiler.py"}
"""What knows parts of torch, and of its compiler, that may move."""

STEADY = {
    *("_version", "_base", "_is_view", "_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    *(
        "_forward_hooks",
        "_forward_pre_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
        "_post_accumulate_grad_hooks",
        "_flat_weights",
        "_flat_weights_names",
    ),
    *("_C", "_ops", "_schema", "_opname", "_to_copy", "_grouped_mm", "_validate_args", "_Replicate"),
}
"""What other modules use of torch, too: it has been the same for years, or users name it."""

UNDOCUMENTED = {"bound_device_id"}
"""Not private by name."""

OTHERS = {"_asdict", "_exit", "_getframe"}
"""Of the standard library."""


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
        return f"{module.removeprefix('penstock.').replace('.', '/')}.py" not in COMPAT
    parts = name.split(".")
    private = next((index for index, part in enumerate(parts) if part.startswith("_") and part[:2] != "__"), None)
    return parts[0] == "penstock" and private is not None and module.split(".")[:private] != parts[:private]


def is_own(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def borrowed(tree: ast.AST) -> set[str]:
    """The private attributes that code uses of other objects than its own."""
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    foreign = {node.attr for node in attributes if not is_own(node)}
    return {name for name in foreign if (name[0] == "_" and name[:2] != "__") or name in UNDOCUMENTED}


def defined(tree: ast.AST) -> Iterator[str]:
    """The names of functions, fields, variables and attributes that code defines."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and is_own(node):
            yield node.attr


def test_what_may_move_in_torch_is_used_in_one_place() -> None:
    trees = {file.relative_to(HOME): ast.parse(file.read_text()) for file in HOME.rglob("*.py")}
    ours = {name for file, tree in trees.items() if str(file) not in COMPAT for name in defined(tree)}
    used = {file: borrowed(tree) - ours - STEADY - OTHERS for file, tree in trees.items()}
    assert {str(file) for file, names in used.items() if names} == COMPAT
    assert used[Path("_base/compat.py")] >= {"bound_device_id", "_timeout", "_cdata"}


def test_no_package_has_a_secret_door() -> None:
    files = {file: ".".join(("penstock", *file.relative_to(HOME).with_suffix("").parts)) for file in HOME.rglob("*.py")}
    assert len(files) > 300
    assert [(module, n) for file, module in files.items() for n in imported(file) if trespasses(module, n)] == []


def test_a_secret_door_is_seen() -> None:
    assert trespasses("penstock.runtime.step.bound_schedules", "penstock.partition._compat.flatten")
    assert trespasses("penstock.runtime.step.bound_schedules", "penstock.partition.trees._Walk")
    assert not trespasses("penstock.cli.run", "penstock.cli._traffic.read")
    assert trespasses("penstock.partition.nested", "torch.utils._pytree.tree_flatten")
