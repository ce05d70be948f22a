"""The unsplit model's data: the batches of TARGET, and the rows of each microbatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock._base.errors import ArgumentError
from penstock._base.pytree import leaf_tensors, map_tensors
from penstock.distributed.launch.target import Target
from penstock.verification.blame.finding import Finding
from penstock.verification.blame.names import Part, digest
from penstock.verification.first_difference import FORWARD


@dataclass(frozen=True, slots=True)
class Data:
    """A step's data, cut into microbatches; `target` is None if unknown."""

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
        """Select rows of each tensor that has all of them."""
        return map_tensors(lambda x: x[rows.to(x.device)] if x.dim() and len(x) == self.count else x, tree)


def get_batch(spec: Target, step: int) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
    """Return args, kwargs and target of a step. Raise ArgumentError if `batches` returns something else."""
    batches = spec.training.get("batches")
    if batches is None:
        return spec.args, spec.kwargs, spec.target
    batch = batches(step) if callable(batches) else batches[step % len(batches)]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ArgumentError(f"batches returned {type(batch).__name__}; expected (args, target) for each step")
    args, target = batch
    kwargs: Mapping[str, Any] = {}
    if isinstance(args, tuple) and len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
        args, kwargs = args
    return (args if isinstance(args, tuple) else (args,)), kwargs, target


def build_data(spec: Target, first_part: Part, step: int) -> tuple[Data, Finding | None]:
    """Return a step's data, cut as the pipeline cut them, and a finding if it took other data."""
    args, kwargs, target = get_batch(spec, step)
    by_microbatch: dict[int, list[Tensor]] = {}
    for (k, _), value in first_part.boundary(step, FORWARD[0]).items():
        by_microbatch.setdefault(k, []).append(value)
    batch_tensors = [t for t in leaf_tensors((args, dict(kwargs))) if t.dim()]
    if not by_microbatch or not batch_tensors:
        raise ArgumentError(
            "the first stage takes no tensor, or the batch of TARGET has none; pass both the same inputs"
        )
    batch, shape = batch_tensors[0], batch_tensors[0].shape[1:]
    inputs = [next((t for t in by_microbatch[k] if t.shape[1:] == shape), None) for k in sorted(by_microbatch)]
    rows = _find_rows(inputs, batch)
    if sorted(row for microbatch_rows in rows for row in microbatch_rows) == [*range(len(batch))]:
        return Data(args, kwargs, target, [torch.tensor(microbatch_rows) for microbatch_rows in rows]), None
    sizes = [0 if t is None else len(t) for t in inputs]
    all_rows = torch.arange(len(batch))
    cut = all_rows.split(sizes) if sum(sizes) == len(batch) else all_rows.tensor_split(len(inputs))  # type: ignore[no-untyped-call]
    return Data(args, kwargs, target, [*cut]), _explain_mismatch(spec, first_part, step, inputs, rows, len(batch))


def _explain_mismatch(
    spec: Target, first_part: Part, step: int, inputs: Sequence[Tensor | None], rows: Sequence[list[int]], count: int
) -> Finding:
    k = next((k for k, microbatch_rows in enumerate(rows) if -1 in microbatch_rows or not microbatch_rows), None)
    if k is None:
        flat = [row for microbatch_rows in rows for row in microbatch_rows]
        missing, repeated = sorted({*range(count)} - {*flat}), sorted({row for row in flat if flat.count(row) > 1})
        row_lists = {"no microbatch has": missing, "more than one microbatch has": repeated}
        texts = [
            f"{subject} row{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers[:8]))} of the batch"
            for subject, numbers in row_lists.items()
            if numbers
        ]
        return first_part.make_finding("data", " and ".join(texts), "0F")
    if "batches" not in spec.training:
        raise ArgumentError(
            f"in step {step + 1} the pipeline trains on other inputs than TARGET returns; return the batches, too: "
            '(model, args, target, loss, {"batches": function_of_step})'
        )
    text = f"microbatch {k} has inputs that are not in the step's batch"
    for other_step, relation in ((step - 1, "before"), (step + 1, "after")):
        tensors = [t for t in leaf_tensors(get_batch(spec, other_step)[:2]) if t.dim()] if other_step >= 0 else []
        if tensors and -1 not in (_find_rows([inputs[k]], tensors[0])[0] or [-1]):
            text = f"microbatch {k} has inputs of the batch {relation}"
    return first_part.make_finding("data", text, f"0F{k}", microbatch=k)


def _find_rows(inputs: Sequence[Tensor | None], batch: Tensor) -> list[list[int]]:
    """Return the rows of a batch that each microbatch has; -1 for a row that the batch lacks. Equal rows are used
    once each."""
    rows_by_digest, used = dict[str, list[int]](), set[int]()
    for number, row in enumerate(batch):
        rows_by_digest.setdefault(digest(row), []).append(number)
    rows = list[list[int]]()
    for tensor in inputs:
        rows.append([])
        for candidates in [] if tensor is None else [rows_by_digest.get(digest(row), [-1]) for row in tensor]:
            rows[-1].append(next((number for number in candidates if number not in used), candidates[0]))
            used.add(rows[-1][-1])
    return rows
