"""Brings the model's outputs to the ranks that ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock._base.trees import map_tensors
from penstock.errors import ArgumentError
from penstock.runtime.exact import rules as exact
from penstock.runtime.exact.rules import Layout
from penstock.runtime.execute.engine import Engine
from penstock.schedule import Schedule

Wanted = bool | int | Literal["all"]
"""Who gets a step's outputs: True, the rank of the last stage; "all" ranks; or the rank with that number."""

_ALL = 1


def code_of(wanted: Wanted, ranks: int) -> int:
    """The choice, on which all ranks must agree, as a number: 0 for True and False, since outputs then stay in place.

    Raises:
        ArgumentError: this is not a valid choice.
    """
    if isinstance(wanted, bool):
        return 0
    if wanted == "all":
        return _ALL
    if isinstance(wanted, int) and 0 <= wanted < ranks:
        return _ALL + 1 + wanted
    raise ArgumentError(f"outputs={wanted!r}: expected True, False, 'all' or a rank from 0 to {ranks - 1}")


def words(code: int) -> str:
    """The argument that a code stands for."""
    return {0: "outputs=True or False", _ALL: "outputs='all'"}.get(code, f"outputs={code - _ALL - 1}")


def bring(engine: Engine, schedule: Schedule, outputs: Sequence[Any] | None, code: int) -> tuple[Any, ...] | None:
    """Each microbatch's output, in order, on the ranks that want it; None on the others. Every rank calls it.

    Args:
        outputs: the outputs by microbatch, on the ranks of last stages; None for those that are elsewhere.
        code: the choice, from `code_of`; not 0.
    """
    here = engine.world.rank
    if here is None:
        return None if outputs is None else tuple(outputs)
    wanted = range(engine.world.ranks) if code == _ALL else range(code - _ALL - 1, code - _ALL)
    owners = _owners(schedule)
    mine = {} if outputs is None else {k: outputs[k] for k, owner in owners.items() if owner == here}
    heads = {k: map_tensors(_without_memory, output) for k, output in mine.items()}
    found = {k: head for part in engine.control.gather_line(heads, "the outputs") for k, head in part.items()}
    for k, owner in owners.items():
        if here == owner:
            found[k] = map_tensors(partial(_sent, engine, owner, wanted), mine[k])
        elif here in wanted:
            found[k] = map_tensors(partial(_received, engine, owner, wanted), found[k])
    return tuple(found[k] for k in owners) if here in wanted else None


def _owners(schedule: Schedule) -> dict[int, int]:
    """The rank that has each microbatch's output, ascending by microbatch."""
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
