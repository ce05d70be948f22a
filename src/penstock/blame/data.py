"""What the unsplit model trains on: the batches that TARGET returns, and which of their rows each microbatch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from penstock.blame.finding import Finding
from penstock.blame.names import Part
from penstock.blame.replay import Data
from penstock.errors import ArgumentError
from penstock.launch.target import Target
from penstock.proof.trail import FORWARD
from penstock.trees import leaf_tensors, map_tensors

IGNORED = -100
"""Labels that `torch.nn.functional.cross_entropy` does not count."""


@dataclass(slots=True)
class Feed:
    """What TARGET says.

    Attributes:
        loss: `loss(output, target)`; None: the model computes it.
        batch: args, kwargs and target of one batch.
        batches: the same for each step: a list, or a function of the step from 0; None: `batch` in each.
        optimizer: makes an optimizer for the model; None: the pipeline's is right.
        max_norm: what gradients are clipped to; None: as the pipeline does.
    """

    loss: Callable[..., Tensor] | None
    batch: tuple[tuple[Any, ...], Mapping[str, Any], Any]
    batches: Callable[[int], Any] | Sequence[Any] | None = None
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    max_norm: float | None = None

    @classmethod
    def of(cls, given: Target) -> Feed:
        """What a TARGET returned."""
        more, batch = given.training, (given.args, given.kwargs, given.target)
        return cls(given.loss, batch, more.get("batches"), more.get("optimizer"), more.get("clip_grad_norm"))

    def at(self, step: int) -> tuple[tuple[Any, ...], Mapping[str, Any], Any]:
        """Args, kwargs and target of a step. Raises ArgumentError: it is something else."""
        if self.batches is None:
            return self.batch
        found = self.batches(step) if callable(self.batches) else self.batches[step % len(self.batches)]
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ArgumentError(f"batches returned {type(found).__name__}; expected (args, target) for each step")
        args, target = found
        kwargs: Mapping[str, Any] = {}
        if isinstance(args, tuple) and len(args) == 2 and isinstance(args[0], tuple) and isinstance(args[1], dict):
            args, kwargs = args
        return (args if isinstance(args, tuple) else (args,)), kwargs, target

    def counted(self, target: Any) -> int:
        """How many labels count."""
        labels = [t for t in leaf_tensors(target) if not t.is_floating_point()]
        return int((labels[0] != IGNORED).sum()) if labels else 0

    def other_targets(self, at: Data, step: int, k: int) -> Iterator[tuple[str, Any]]:
        """What a microbatch's loss may have taken by mistake."""
        for j in range(len(at.rows)):
            if j != k:
                yield f"the labels of microbatch {j}", at.target_of(j)
        for other in dict.fromkeys((max(step - 1, 0), step + 1)):
            if other != step:
                which = "before" if other < step else "after"
                target = map_tensors(lambda x: x[at.rows[k]] if len(x) == at.count else x, self.at(other)[2])
                yield f"the labels of the batch {which}", target


def data_of(feed: Feed, parts: Sequence[Part], step: int) -> tuple[Data, Finding | None]:
    """A step's data, cut as the pipeline cut them; and, if it took others, what is wrong with them."""
    args, kwargs, target = feed.at(step)
    first = parts[0]
    taken: dict[int, list[Tensor]] = {}
    for (k, _), value in first.outside(step, FORWARD[0]).items():
        taken.setdefault(k, []).append(value)
    whole = [t for t in leaf_tensors((args, dict(kwargs))) if t.dim()]
    if not taken or not whole:
        raise ArgumentError(
            "the first stage takes no tensor, or the batch of TARGET has none; pass both the same inputs"
        )
    batch, mine = (
        whole[0],
        [next((t for t in taken[k] if t.shape[1:] == whole[0].shape[1:]), None) for k in sorted(taken)],
    )
    sizes = [0 if t is None else len(t) for t in mine]
    rows = [None if t is None else _rows(t, batch) for t in mine]
    flat = [row for found in rows for row in (found or ())]
    in_order = [*torch.arange(len(batch)).tensor_split(len(mine))]
    if sum(sizes) == len(batch):
        in_order = [*torch.arange(len(batch)).split(sizes)]  # type: ignore[no-untyped-call]
    known = all(found is not None for found in rows)
    if known and sorted(flat) == list(range(len(batch))):
        return Data(args, kwargs, target, [torch.tensor(found) for found in rows]), None
    data = Data(args, kwargs, target, in_order)
    return data, _misfed(feed, first, step, mine, rows, len(batch))


def _misfed(
    feed: Feed, first: Part, step: int, mine: Sequence[Tensor | None], rows: Sequence[list[int] | None], count: int
) -> Finding:
    where: dict[str, Any] = {"stage": first.stage, "rank": first.rank}
    k = next((k for k, found in enumerate(rows) if found is None), None)
    if k is None:
        flat = [row for found in rows for row in (found or ())]
        lacking, several = sorted({*range(count)} - {*flat}), sorted({row for row in flat if flat.count(row) > 1})
        said = [(lacking, "in no microbatch"), (several, "in more than one")]
        texts = [f"rows {', '.join(map(str, which[:8]))} of the batch are {how}" for which, how in said if which]
        return Finding("data", " and ".join(texts), "0F", **where)
    where |= {"microbatch": k}
    given = mine[k]
    for other in (step - 1, step + 1):
        if other >= 0 and feed.batches is not None and given is not None:
            whole = [t for t in leaf_tensors(feed.at(other)[:2]) if t.dim()]
            if whole and _rows(given, whole[0]) is not None:
                text = f"microbatch {k} has inputs of the batch {'before' if other < step else 'after'}"
                return Finding("data", text, f"0F{k}", **where)
    if feed.batches is None:
        raise ArgumentError(
            f"in step {step + 1} the pipeline trains on other inputs than TARGET returns; return the batches, too: "
            '(model, args, target, loss, {"batches": function_of_step})'
        )
    return Finding("data", f"microbatch {k} has inputs that are not in the step's batch", f"0F{k}", **where)


def _rows(part: Tensor, whole: Tensor) -> list[int] | None:
    """Which rows of a batch a microbatch has; None if one is not there."""
    if part.shape[1:] != whole.shape[1:] or part.dtype != whole.dtype:
        return None
    left, found = dict.fromkeys(range(len(whole))), list[int]()
    for row in part.cpu():
        at = next((i for i in left if torch.equal(row, whole[i].cpu())), None)
        if at is None:
            return None
        del left[at]
        found.append(at)
    return found
