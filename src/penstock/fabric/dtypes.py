"""The data types of what is sent, by torch's names, and the reduction operations."""

from __future__ import annotations

from typing import Literal, get_args

from penstock.errors import ArgumentError

BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""The size of one element of each type, in bytes."""

USUAL = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}
"""The default type for each element size in bytes."""

NCCL = {"float16": "half", "float32": "float", "float64": "double"}
"""nccl-tests' names, where they differ."""

Op = Literal["sum", "prod", "min", "max", "avg"]
OPS: tuple[Op, ...] = get_args(Op)

REDUCES = ("all_reduce", "reduce_scatter", "reduce")
"""Collectives that take a reduction op."""


def dtype_of(text: str) -> str:
    """Returns torch's name of a type, given torch's or nccl-tests'. Raises ArgumentError if it is unknown."""
    name = {theirs: ours for ours, theirs in NCCL.items()}.get(text, text)
    if name not in BYTES:
        raise ArgumentError(f"there is no dtype {text!r}: give one of {', '.join(BYTES)}")
    return name


def op_of(text: str, dtype: str) -> Op:
    """Looks up a reduction op by name. Raises ArgumentError if it is unknown or not defined for this type."""
    for op in OPS:
        if op == text:
            break
    else:
        raise ArgumentError(f"there is no op {text!r}: give one of {', '.join(OPS)}")
    if op == "avg" and "float" not in dtype:
        raise ArgumentError(f"{dtype} cannot hold an average: give --op sum, or a dtype like float32")
    return op
