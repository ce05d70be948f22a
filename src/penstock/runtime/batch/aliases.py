"""Refuses tensors of a batch that share memory if the forward updates one of them in place.

On one device the others change with it: `loss(model(x), x)` compares with what a `ReLU(inplace=True)` made of x. In a
pipeline each has its own memory, often in another process, and would not see the update.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock.partition.values.memory import overlap
from penstock.partition.values.objects import input_path
from penstock.runtime.batch.cutting import Batch
from penstock.runtime.batch.microbatches import leaves_of


def refuse_aliases(overwritten: Collection[str], batch: Batch) -> None:
    """Raises ArgumentError if an input that the forward updates in place shares memory with another input or a target.

    If the batch comes in pieces, this includes the inputs of other microbatches.

    `overwritten`: the paths of the inputs that the forward updates in place.
    """
    if not overwritten:
        return
    inputs: list[tuple[str, Tensor]] = []  # by their paths, as a caller would write them
    targets: list[tuple[str, Tensor]] = []
    for piece in batch.pieces or [batch]:
        given = leaves_of((piece.args, dict(piece.kwargs)))
        inputs += [(input_path(path), leaf) for path, leaf in given if isinstance(leaf, Tensor)]
        targets += [(f"target{path}", leaf) for path, leaf in leaves_of(piece.target) if isinstance(leaf, Tensor)]
    for place, (path, tensor) in enumerate(inputs):
        if path not in overwritten:
            continue
        others = [*inputs[:place], *inputs[place + 1 :], *targets]
        found = next((other for other, beside in others if overlap(tensor, beside)), None)
        if found is not None:
            it = f"{found} of another microbatch" if found == path else found
            raise ArgumentError(
                f"the forward updates input {path} in place, and {it} shares memory with it: on one device {it} would "
                "change as well, but in a pipeline each has memory of its own. Pass a clone as one of the two "
                "(x.clone()), or have the model not update its input in place"
            )
