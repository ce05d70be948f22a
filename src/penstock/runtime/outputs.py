"""The model's outputs: brought to the ranks that ask for them, and put together to those of the whole batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.errors import ArgumentError, ShapeError
from penstock.partition._compat import flatten, unflatten
from penstock.partition.loan import map_tensors
from penstock.runtime import exact
from penstock.runtime.batch_dims import Dim, Dims, checked
from penstock.runtime.engine import Engine
from penstock.runtime.exact import Layout
from penstock.schedule import Schedule

Wanted = bool | int | Literal["all"]
"""Who gets a step's outputs: True, where the last stage is; "all" ranks; or the rank of that number."""

_ALL = 1

_FIRST = Dims("output")


def code_of(wanted: Wanted, ranks: int) -> int:
    """What every rank must say alike, as a number: 0 where outputs stay where they are, True or not.

    Raises:
        ArgumentError: it is none of what `Wanted` allows.
    """
    if isinstance(wanted, bool):
        return 0
    if wanted == "all":
        return _ALL
    if isinstance(wanted, int) and 0 <= wanted < ranks:
        return _ALL + 1 + wanted
    raise ArgumentError(f"outputs={wanted!r}: expected True, False, 'all' or a rank from 0 to {ranks - 1}")


def words(code: int) -> str:
    """A code as the argument that it stands for."""
    return {0: "outputs=True or False", _ALL: "outputs='all'"}.get(code, f"outputs={code - _ALL - 1}")


def bring(engine: Engine, schedule: Schedule, outputs: Sequence[Any] | None, code: int) -> tuple[Any, ...] | None:
    """Each microbatch's output, in order, on the ranks that want it; None on others. Every rank calls it.

    Args:
        outputs: by microbatch, on the ranks of last stages; None for what is elsewhere.
        code: from `code_of`, not 0.
    """
    here = engine.world.rank
    if here is None:
        return None if outputs is None else tuple(outputs)
    wanted = range(engine.world.ranks) if code == _ALL else range(code - _ALL - 1, code - _ALL)
    owners = _owners(schedule)
    mine = {} if outputs is None else {k: outputs[k] for k, owner in owners.items() if owner == here}
    heads = {k: map_tensors(_without_memory, output) for k, output in mine.items()}
    found = {k: head for part in engine.control.gather_line(heads) for k, head in part.items()}
    for k, owner in owners.items():
        if here == owner:
            found[k] = map_tensors(partial(_sent, engine, owner, wanted), mine[k])
        elif here in wanted:
            found[k] = map_tensors(partial(_received, engine, owner, wanted), found[k])
    return tuple(found[k] for k in owners) if here in wanted else None


def join(outputs: Sequence[Any], sizes: Sequence[int], dims: Dims = _FIRST) -> Any:
    """The output of the whole batch: that of each microbatch, of `sizes` rows, put together.

    Raises:
        ArgumentError: some outputs are on another rank.
        ShapeError: for a value that is not a tensor of its microbatch's rows, unless it is plain and the same in all,
            or `dims` say what becomes of it.
    """
    refuse_missing(outputs)
    flats = [flatten(output) for output in outputs]
    first = flats[0]
    if any(flat.structure != first.structure for flat in flats):
        raise ShapeError(f"the microbatches' outputs differ in structure, so that they make no whole; {_INSTEAD}")
    dims.refuse_unknown(first.paths)
    columns = zip(*(flat.leaves for flat in flats), strict=True)
    pairs = zip(columns, first.paths, strict=True)
    return unflatten(
        [_joined(column, sizes, f"output{path}", dims.of(path)) for column, path in pairs], first.structure
    )


def refuse_missing(outputs: Sequence[Any]) -> None:
    """Raises ArgumentError if some outputs are on another rank."""
    if any(output is None for output in outputs):
        raise ArgumentError(
            "outputs=True: the schedule has two copies of the model, and this rank one's outputs alone; give "
            "outputs='all' or a rank"
        )


_INSTEAD = (
    "state its batch_dims ('output': a dimension; None where it is the same in all; 'mean' or 'sum'), give merge=, or "
    "take each microbatch's own, from evaluate(..., outputs=True).outputs"
)


def _joined(column: Sequence[Any], sizes: Sequence[int], where: str, dim: Dim) -> Any:
    if len(column) == 1:
        return column[0]
    if not all(isinstance(value, Tensor) for value in column):
        if any(value is not column[0] and value != column[0] for value in column):
            raise ShapeError(f"{where} is not the same in all microbatches ({column[0]!r} in the first); {_INSTEAD}")
        return column[0]
    if isinstance(dim, str):
        return _reduced(column, sizes, where, dim)
    if dim is None:
        if not all(torch.equal(value, column[0]) for value in column[1:]):
            raise ShapeError(f"{where} is not the same in all microbatches, as batch_dims says; {_INSTEAD}")
        return column[0]
    shapes = [list(value.shape) for value in column]
    if dim or column[0].dim():
        dim = checked(dim, column[0], where)
    if any(shape[dim : dim + 1] != [size] for shape, size in zip(shapes, sizes, strict=True)):
        raise ShapeError(
            f"{where} has shapes {shapes} in microbatches of {list(sizes)} rows, so that they cannot be put together "
            f"to the whole batch's{f' along dimension {dim}' if dim else ''}; {_INSTEAD}"
        )
    rests = [shape[:dim] + shape[dim + 1 :] for shape in shapes]
    if any(rest != rests[0] for rest in rests):
        raise ShapeError(f"{where} has shapes {shapes}, which make no one tensor; {_INSTEAD}")
    return torch.cat(list(column), dim)


def _reduced(column: Sequence[Tensor], sizes: Sequence[int], where: str, how: str) -> Tensor:
    shapes = [list(value.shape) for value in column]
    if any(shape != shapes[0] for shape in shapes):
        raise ShapeError(f"{where} has shapes {shapes}, of which there is no {how}; {_INSTEAD}")
    weights = exact.seeds([float(size) for size in sizes]) if how == "mean" else [1.0] * len(sizes)
    total = column[0] * weights[0]
    for value, weight in zip(column[1:], weights[1:], strict=True):
        total = total + value * weight
    return total


def _owners(schedule: Schedule) -> dict[int, int]:
    """The rank that each microbatch's output is on, ascending by microbatch."""
    placement = schedule.placement
    lasts = [stage for stage in range(placement.stages) if placement.is_last(stage)]
    found = {k: placement.rank_of[stage] for stage in lasts for k in schedule.numbers_on(stage)}
    return dict(sorted(found.items()))


def _without_memory(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _sent(engine: Engine, owner: int, wanted: Sequence[int], tensor: Tensor) -> Tensor:
    if tensor.numel():
        engine.control.bring(exact.pack(tensor).cpu().view(torch.uint8), owner, wanted)
    return tensor


def _received(engine: Engine, owner: int, wanted: Sequence[int], head: Tensor) -> Tensor:
    layout = Layout(tuple(head.shape), head.stride(), head.dtype, 0, False)
    buffer = exact.allocate(layout, torch.device("cpu"))
    if head.numel():
        engine.control.bring(buffer.flat.view(torch.uint8), owner, wanted)
    return exact.unpack(buffer).to(engine.devices[engine.ranks[0]])
