"""A batch without its data: what the other ranks need to record it.

A recording looks only at the values of integer and boolean tensors (the forward may branch on them), so these are sent.
For floating-point tensors only shape, strides and dtype are.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError, PartitionError, PenstockError
from penstock._base.formatting import pluralize
from penstock._base.pytree import flatten, leaf_tensors, map_tensors, unflatten
from penstock.partition.nested import input_path
from penstock.partition.recording import is_readable
from penstock.runtime.batch.cut import CutBatch, Example

ONE_VALUE = "Expected more than 1 value per channel"
"""Torch's message if batch norm cannot compute a variance."""


@dataclass(frozen=True, slots=True)
class Outline:
    """Examples of microbatches, in which tensors without values are on the meta device. Made to be pickled.

    Attributes:
        examples: one per microbatch.
        device: the type of device that the tensors are on ("cpu", "cuda").
        sizes: the rows of each microbatch.
    """

    examples: tuple[Example, ...]
    device: str
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, cut: CutBatch) -> Outline:
        """Return the outline of these microbatches."""
        return cls.of_example(*(unflatten(piece.leaves, piece.structure) for piece in cut.pieces), sizes=cut.sizes)

    @classmethod
    def of_example(cls, *examples: Example, sizes: tuple[int, ...] = ()) -> Outline:
        """Return the outline of a batch that is not cut yet, or of its microbatches."""
        device = next((tensor.device.type for tensor in leaf_tensors(examples)), "cpu")
        return cls(tuple(map_tensors(_without_values, example) for example in examples), device, sizes)

    def fill(self, device: torch.device | None = None) -> list[Example]:
        """Return the examples to record from, on `device` (None: the type of device that they came from).

        Floating-point tensors have memory, but arbitrary values.
        """
        target = device or torch.device(self.device)
        return [map_tensors(lambda tensor: _with_memory(tensor, target), example) for example in self.examples]

    @property
    def text(self) -> str:
        """The first microbatch's tensors, by name, with their shapes."""
        leaves, paths, _ = flatten(self.examples[0])
        pairs = zip(leaves, paths, strict=True)
        return ", ".join(f"{input_path(path)} {list(leaf.shape)}" for leaf, path in pairs if isinstance(leaf, Tensor))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what is sent to other ranks. Raise ArgumentError if something cannot be sent."""
        for flat in map(flatten, self.examples):
            for leaf, path in zip(flat.leaves, flat.paths, strict=True):
                try:
                    if not isinstance(leaf, Tensor):
                        pickle.dumps(leaf)
                except Exception as error:
                    raise ArgumentError(
                        f"input {input_path(path)} is a {type(leaf).__name__} that cannot be pickled ({error}), and "
                        "every rank needs it to record the model; pass tensors and plain values"
                    ) from error
        return Outline, (self.examples, self.device, self.sizes)


_OTHER_ARGUMENTS = r"\(\) (takes|missing|got an unexpected keyword|got multiple values) "
_CUTTING = (
    ". Inputs are cut along their first dimension: state another one in batch_dims=, or None for what goes whole to "
    "each microbatch. A tensor for the whole batch that is no input (a default argument, a buffer) is not cut: pass it "
    "as an input. Cut what no dimension describes, such as a list of images, with a function: split_fn="
)


class SingleRowError(PartitionError):
    """A norm got a single row in training, which has no variance."""


@contextmanager
def explaining_cut(outline: Outline) -> Iterator[None]:
    """Wrap a recording of microbatches: add a note on how the batch was cut to an error of the model.

    Raises:
        SingleRowError: batch norm gets a single row.
    """
    sizes = outline.sizes
    rows, pieces = sum(sizes), pluralize(len(sizes), "microbatch")
    try:
        yield
    except Exception as error:  # from inside a block, or from the model's own forward
        cause = error.__cause__ or error
        if isinstance(cause, PenstockError) or not sizes:
            raise
        args, _ = outline.examples[0]
        if len(args) == 2 and isinstance(args[0], (tuple, list)) and isinstance(args[1], Mapping):
            error.add_note("penstock: if args is a pair of positional and keyword inputs, pass them as args and kwargs")
        is_misnamed = isinstance(cause, TypeError) and re.search(_OTHER_ARGUMENTS, str(cause))  # however it is cut
        error.add_note(
            f"penstock: recorded for a batch of {pluralize(rows, 'row')} in {pieces}; the first got "
            f"{outline.text or 'no tensor'}{'' if is_misnamed else _CUTTING}"
        )
        if ONE_VALUE not in str(error) or min(sizes) > 1:
            raise
        rows_text = "the batch has one" if rows == 1 else f"{rows} rows in {pieces} are {', '.join(map(str, sizes))}"
        raise SingleRowError(
            f"batch norm needs more than one row in each microbatch in training, and {rows_text}: pass a larger batch, "
            f"fewer microbatches, or pieces of two rows or more, if you cut it ({' '.join(str(error).split())})"
        ) from error


def _without_values(tensor: Tensor) -> Tensor:
    return tensor.cpu() if is_readable(tensor) else _empty_like(tensor, torch.device("meta"))


def _with_memory(tensor: Tensor, device: torch.device) -> Tensor:
    return _empty_like(tensor, device) if tensor.is_meta else tensor.to(device)


def _empty_like(tensor: Tensor, device: torch.device) -> Tensor:
    empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return empty.requires_grad_(tensor.requires_grad)
