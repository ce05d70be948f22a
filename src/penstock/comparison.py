"""What a proof consists of: tensors compared one by one, and the report of all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.errors import VerificationError

TIED_TOLERANCE = 1e-6
"""Largest difference, over the tensor's largest entry, where terms of several stages or replicas are added in another
order; in half precision `TIED_EPSILONS` of its epsilons."""

TIED_EPSILONS = 4

Verdict = Literal["equal", "close", "different", "missing", "unexpected"]


@dataclass(frozen=True, slots=True)
class Row:
    """One comparison.

    Attributes:
        kind: output, loss, gradient or buffer.
        name: of the parameter or buffer; of the leaf, for an output.
        stages: that hold it.
        verdict: "equal" to the bit (or absent in both); "close" within the tolerance that holds for it; "different";
            "missing" where the reference has one; "unexpected" where it has none.
        max_difference: largest absolute difference.
        max_reference: largest absolute entry of the reference.
        allowed: why it need not be equal to the bit; empty if it must.
    """

    kind: str
    name: str
    stages: tuple[int, ...]
    verdict: Verdict
    max_difference: float = 0.0
    max_reference: float = 0.0
    allowed: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict == "equal" or (self.verdict == "close" and bool(self.allowed))


@dataclass(frozen=True, slots=True)
class Report:
    """What `verify` found: a row for every output, the loss, every parameter and every buffer of the unsplit model."""

    rows: tuple[Row, ...] = field(repr=False)
    schedule: str
    ranks: int
    stages: int
    microbatches: int
    loss: float | None
    exact: bool
    replicas: int = 1

    @property
    def ok(self) -> bool:
        """Whether everything is equal, as far as it was promised."""
        return all(row.ok for row in self.rows)

    @property
    def wrong(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if not row.ok)

    def summary(self) -> str:
        """One line: what was proven, or the first layer that differs."""
        gradients = [row for row in self.rows if row.kind == "gradient"]
        if self.ok:
            equal = sum(row.verdict == "equal" for row in gradients)
            close = [row for row in self.rows if row.verdict == "close"]
            text = f"{equal} of {len(gradients)} gradients are equal to the bit"
            if close:
                worst = max((r.max_difference / r.max_reference for r in close if r.max_reference), default=0.0)
                why = sorted({row.allowed for row in close})
                values = "1 value is" if len(close) == 1 else f"{len(close)} values are"
                text += f"; {values} within {worst:.1e} of their largest entry ({'; '.join(why)})"
            return text
        first = self.wrong[0]
        text = f"{len(self.wrong)} of {len(self.rows)} values differ; the first is {first.kind} {first.name}"
        text += f" on stage {', '.join(map(str, first.stages))}" if first.stages else ""
        if first.verdict in ("missing", "unexpected"):
            return f"{text}: {first.verdict} in the pipeline"
        return f"{text}: by {first.max_difference:.3g} (largest entry {first.max_reference:.3g})"

    def check(self) -> Report:
        """Returns itself. Raises VerificationError, with the summary, unless everything is equal."""
        if not self.ok:
            raise VerificationError(self.summary())
        return self

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "ok": self.ok, "summary": self.summary()}


def compare(
    kind: str,
    name: str,
    stages: tuple[int, ...],
    mine: Tensor | None,
    other: Tensor | None,
    exact: bool,
    reordered: str = "",
) -> Row:
    """Compares one tensor with that of the unsplit model; either may be absent.

    Args:
        exact: equality to the bit is demanded.
        reordered: why terms may have been added in another order; empty where they must not.
    """
    if mine is None or other is None:
        absent: Verdict = "missing" if mine is None else "unexpected"
        return Row(kind, name, stages, "equal" if mine is other else absent)
    mine, other = _dense(mine), _dense(other)
    if mine.shape != other.shape or mine.dtype != other.dtype:
        return Row(kind, name, stages, "different", float("inf"), float("inf"))
    if _same_bits(mine, other):
        return Row(kind, name, stages, "equal", 0.0, _largest(other))
    difference, largest = _largest(mine.double() - other.double()), _largest(other)
    if reordered and difference <= _tied_tolerance(other.dtype) * largest:
        return Row(kind, name, stages, "close", difference, largest, reordered)
    if not exact and _is_close(mine, other):
        return Row(kind, name, stages, "close", difference, largest, "not demanded to the bit here")
    return Row(kind, name, stages, "different", difference, largest)


def _tied_tolerance(dtype: torch.dtype) -> float:
    return max(TIED_TOLERANCE, TIED_EPSILONS * torch.finfo(dtype).eps)


def _same_bits(mine: Tensor, other: Tensor) -> bool:
    """Equality of bits: tells -0 from 0, and finds the same NaN equal."""
    return torch.equal(*(tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (mine, other)))


def _is_close(mine: Tensor, other: Tensor) -> bool:
    try:
        torch.testing.assert_close(mine, other)
    except AssertionError:
        return False
    return True


def _dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _largest(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0
