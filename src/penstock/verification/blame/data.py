"""What the unsplit model trains on: the batches that TARGET returns, and which of their rows each microbatch has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.trees import leaf_tensors, map_tensors
from penstock.distributed.launch.target import Target
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Part, digest
from penstock.verification.trail import FORWARD


@dataclass(frozen=True, slots=True)
class Data:
    """What a step trains on, cut into microbatches; `target` is None if unknown."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    rows: Sequence[Tensor]

    @property
    def count(self) -> int:
        return sum(map(len, self.rows))

    def inputs(self, microbatch: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the inputs of one microbatch."""
        args, kwargs = self.cut((self.args, dict(self.kwargs)), self.rows[microbatch])
        return args, kwargs

    def cut(self, tree: Any, rows: Tensor) -> Any:
        """Return the same with some rows of each tensor that has all."""
        return map_tensors(lambda x: x[rows.to(x.device)] if x.dim() and len(x) == self.count else x, tree)


def batch_of(given: Target, step: int) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    """Args, kwargs and target of a step. Raise ArgumentError: it is something else."""
    batches = given.training.get("batches")
    if batches is None:
        return given.args, given.kwargs, given.target
    found = batches(step) if callable(batches) else batches[step % len(batches)]
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise ArgumentError(f"batches returned {type(found).__name__}; expected (args, target) for each step")
    args, target = found
    kwargs: Mapping[str, Any] = {}
    if isinstance(args, tuple) and len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
        args, kwargs = args
    return (args if isinstance(args, tuple) else (args,)), kwargs, target


def data_of(given: Target, first: Part, step: int) -> tuple[Data, Finding | None]:
    """Return a step's data, cut as the pipeline cut them; and, if it took others, what is wrong with them."""
    args, kwargs, target = batch_of(given, step)
    taken: dict[int, list[Tensor]] = {}
    for (k, _), value in first.outside(step, FORWARD[0]).items():
        taken.setdefault(k, []).append(value)
    whole = [t for t in leaf_tensors((args, dict(kwargs))) if t.dim()]
    if not taken or not whole:
        raise ArgumentError(
            "the first stage takes no tensor, or the batch of TARGET has none; pass both the same inputs"
        )
    batch, shape = whole[0], whole[0].shape[1:]
    mine = [next((t for t in taken[k] if t.shape[1:] == shape), None) for k in sorted(taken)]
    rows = _rows(mine, batch)
    if sorted(row for found in rows for row in found) == [*range(len(batch))]:
        return Data(args, kwargs, target, [torch.tensor(found) for found in rows]), None
    sizes = [0 if t is None else len(t) for t in mine]
    every = torch.arange(len(batch))
    cut = every.split(sizes) if sum(sizes) == len(batch) else every.tensor_split(len(mine))  # type: ignore[no-untyped-call]
    return Data(args, kwargs, target, [*cut]), _misfed(given, first, step, mine, rows, len(batch))


def _misfed(
    given: Target, first: Part, step: int, mine: Sequence[Tensor | None], rows: Sequence[list[int]], count: int
) -> Finding:
    k = next((k for k, found in enumerate(rows) if -1 in found or not found), None)
    if k is None:
        flat = [row for found in rows for row in found]
        lacking, several = sorted({*range(count)} - {*flat}), sorted({row for row in flat if flat.count(row) > 1})
        said = {"no microbatch has": lacking, "more than one microbatch has": several}
        texts = [
            f"{who} row{'s' * (len(which) > 1)} {', '.join(map(str, which[:8]))} of the batch"
            for who, which in said.items()
            if which
        ]
        return first.found("data", " and ".join(texts), "0F")
    if "batches" not in given.training:
        raise ArgumentError(
            f"in step {step + 1} the pipeline trains on other inputs than TARGET returns; return the batches, too: "
            '(model, args, target, loss, {"batches": function_of_step})'
        )
    text = f"microbatch {k} has inputs that are not in the step's batch"
    for other, which in ((step - 1, "before"), (step + 1, "after")):
        whole = [t for t in leaf_tensors(batch_of(given, other)[:2]) if t.dim()] if other >= 0 else []
        if whole and -1 not in (_rows([mine[k]], whole[0])[0] or [-1]):
            text = f"microbatch {k} has inputs of the batch {which}"
    return first.found("data", text, f"0F{k}", microbatch=k)


def _rows(parts: Sequence[Tensor | None], whole: Tensor) -> list[list[int]]:
    """Return which rows of a batch each microbatch has: -1 for one that is not there. Of rows that are alike, each
    once."""
    known, used = dict[str, list[int]](), set[int]()
    for number, row in enumerate(whole):
        known.setdefault(digest(row), []).append(number)
    found = list[list[int]]()
    for part in parts:
        found.append([])
        for alike in [] if part is None else [known.get(digest(row), [-1]) for row in part]:
            found[-1].append(next((number for number in alike if number not in used), alike[0]))
            used.add(found[-1][-1])
    return found
