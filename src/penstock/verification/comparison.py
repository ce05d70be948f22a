"""Comparison of single tensors, and the report of all comparisons."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from penstock._base.aliases import accept_old_names
from penstock._base.errors import VerificationError
from penstock._base.memory import same_bits

TIED_TOLERANCE, TIED_EPSILONS = 1e-6, 4
"""Largest difference if terms of several stages or replicas are added in another order, relative to the largest
entry, or, for each entry, to the sum of its terms' sizes. In half precision, this number of epsilons."""

DOUBLE = dict.fromkeys((torch.float64, torch.complex128), (1e-7, 1e-7))
TOLERANCES = DOUBLE | {torch.float16: (1e-3, 1e-5), torch.bfloat16: (1.6e-2, 1e-5)}
"""If bits are not demanded: the relative and absolute tolerance of an entry; (1.3e-6, 1e-5) in float32. These are
`torch.testing.assert_close`'s. But any gradient smaller than its absolute one would pass, so here that is at most this
fraction (or `TIED_EPSILONS` of its epsilons) of the largest entry."""

NOISE_FACTOR = 3
"""If stages are compiled under autocast, they round elsewhere, but no worse than eager code: the noise of one device's
own gradients, of which theirs may be twice as far from full precision. It depends on nothing that the pipeline did."""

Key = tuple[str, str]
"""A value's kind and name."""

Verdict = Literal["equal", "close", "different", "missing", "unexpected", "undefined"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """One comparison.

    Attributes:
        kind, name: output, loss, gradient or buffer, and its name; held by `stages`.
        verdict: "equal" to the bit (or absent in both); "close" within the tolerance that holds for it; "different";
            "missing" if only the reference has one; "unexpected" if the reference has none; "undefined" if both are
            alike but nothing in them is finite, which is inconclusive for a loss or a gradient (about an output, if
            all is NaN).
        max_difference: largest absolute difference of finite entries; infinite if an entry is finite in only one of
            them, or NaN or infinite in another way.
        max_reference: largest absolute finite entry of the reference.
        max_terms: largest sum of the sizes of an entry's terms, if they cancel so far that the difference must be
            judged against them; otherwise 0.
        tolerance_reason: why it need not be bitwise identical; empty if it must.
        step: the first failing step, from 1; 0: none.
    """

    kind: str
    name: str
    stages: tuple[int, ...]
    verdict: Verdict
    max_difference: float = 0.0
    max_reference: float = 0.0
    tolerance_reason: str = ""
    step: int = 0
    max_terms: float = 0.0

    @property
    def ok(self) -> bool:
        return self.verdict == "equal" or (self.verdict == "close" and bool(self.tolerance_reason))


@dataclass(frozen=True, slots=True)
class Difference:
    """The first value that differs.

    Attributes:
        what: such as "what enters 'blocks.2'", or the gradient of a parameter.
        microbatch: None if it is a sum over microbatches.
        stage: where it was computed.
        max_difference, max_reference: as in `Comparison`.
        shape: what the difference looks like; empty if unknown.
    """

    step: int
    what: str
    microbatch: int | None
    stage: int
    max_difference: float
    max_reference: float
    shape: str = ""

    @property
    def text(self) -> str:
        """In words."""
        location = f"step {self.step}" + ("" if self.microbatch is None else f", microbatch {self.microbatch}")
        size = f"by {self.max_difference:.3g} (largest entry on one device {self.max_reference:.3g})"
        pattern = f"{self.shape and '; '}{self.shape}"
        return f"first difference: {location} on stage {self.stage}: {self.what} differs {size}{pattern}"


@dataclass(frozen=True, slots=True)
class FullBatchCheck:
    """The unsplit model on the whole batch at once, compared with its microbatches.

    Attributes:
        microbatches: the loss that the microbatches' losses make, according to `reduction`.
        whole: the loss of the whole batch.
        verdict: "close" if loss and gradients are, within rounding; "explained" if what acts in training alone makes
            them differ, or both are not finite; "missing" if there is nothing to compare with; "warning" if the loss is
            not a mean over rows, or rows depend on each other; "different" if the batch seems to be cut along the wrong
            dimension.
        why: what explains it; empty if they are close.
        gradient: which gradient differs most, and by how much; empty if none does.
    """

    microbatches: float
    whole: float
    verdict: Literal["close", "explained", "missing", "warning", "different"]
    why: str = ""
    gradient: str = ""

    @property
    def ok(self) -> bool:
        return self.verdict != "different"

    @property
    def text(self) -> str:
        """In words."""
        if self.verdict == "missing":
            return f"the comparison with the whole batch is missing: {self.why}"
        if self.verdict == "close":
            return "the microbatches' loss and gradients are those of the whole batch"
        loss, whole, apart = f"{self.microbatches:.6g}", f"{self.whole:.6g}", abs(self.microbatches - self.whole)
        text = f"the microbatches' loss is {loss}, that of the whole batch {whole}"
        if loss == whole and math.isfinite(apart):
            text = f"the microbatches' loss and that of the whole batch, {whole}, differ by {apart:.1g}"
        return f"{text}{self.gradient and '; '}{self.gradient}: {self.why}"


@accept_old_names(wrong="failures", check="raise_if_failed", whole_batch="full_batch")
@dataclass(frozen=True, slots=True)
class VerificationReport:
    """The result of `verify`: a row for every output, the loss, every parameter and every buffer of the unsplit model.

    Attributes:
        rows: each covers all steps.
        loss: the first step's.
        exact: whether bitwise equality was demanded.
        steps: the number of compared steps.
        full_batch: the comparison with the full batch; None if it was not requested.
        notes: the pipeline's, including what is recomputed in backward.
        first: the first difference; None if there is none, or it could not be located.
    """

    rows: tuple[Comparison, ...] = field(repr=False)
    schedule: str
    ranks: int
    stages: int
    microbatches: int
    loss: float | None
    exact: bool
    replicas: int = 1
    steps: int = 1
    full_batch: FullBatchCheck | None = None
    notes: tuple[str, ...] = ()
    first: Difference | None = None

    @property
    def ok(self) -> bool:
        """Whether everything is equal, as far as promised, and nothing suggests that the batch is cut wrongly."""
        return all(row.ok for row in self.rows) and (self.full_batch is None or self.full_batch.ok)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(row for row in self.rows if not row.ok)

    @property
    def differing(self) -> tuple[Comparison, ...]:
        """The failures with a different value, by their first step, then in the model's order."""
        return tuple(sorted((row for row in self.failures if row.verdict != "undefined"), key=lambda row: row.step))

    def __str__(self) -> str:
        return self.summary()

    def summary(self) -> str:
        """Return one line: what was verified, or the first layer that differs, or why the batch cannot be cut this
        way."""
        if self.differing:
            return self._failure_text()
        if self.failures:
            return self._undefined_text()
        if self.full_batch is not None and not self.full_batch.ok:
            return f"microbatches do not reproduce the full batch: {self.full_batch.text}"
        has_warning = self.full_batch is not None and self.full_batch.verdict in ("missing", "warning")
        return self._success_text() + (f"; warning: {self.full_batch.text}" if self.full_batch and has_warning else "")

    def _success_text(self) -> str:
        gradients = [row for row in self.rows if row.kind == "gradient"]
        equal = sum(row.verdict == "equal" for row in gradients)
        close = [row for row in self.rows if row.verdict == "close"]
        text = f"{equal} of {len(gradients)} gradients are bitwise identical"
        if close:
            sizes = [(row.max_difference, row.max_terms or row.max_reference) for row in close]
            worst = max((difference / size for difference, size in sizes if size), default=0.0)
            subject, owner = ("1 value is", "its") if len(close) == 1 else (f"{len(close)} values are", "their")
            entry = "entry, or of the terms that cancel in it" if any(row.max_terms for row in close) else "entry"
            reasons = "; ".join(sorted({row.tolerance_reason for row in close}))
            text += f"; {subject} within {worst:.1e} of {owner} largest {entry} ({reasons})"
        return text

    def _undefined_text(self) -> str:
        undefined = self.failures
        problems = ["the loss is not finite"] if any(row.kind == "loss" for row in undefined) else []
        for kind in ("output", "gradient"):
            count, total = (sum(row.kind == kind for row in rows) for rows in (undefined, self.rows))
            problems += [f"{count} of {total} {kind}s have no finite entry"] if count else []
        step = f" (step {undefined[0].step})" if undefined[0].step else ""
        check = self.full_batch
        suffix = f"; {check.text}" if check is not None and check.verdict in ("warning", "different") else ""
        return (
            f"inconclusive: on one device, too, {', '.join(problems)}{step}, and such values compare equal "
            f"whatever the pipeline does. Pass weights, a batch and a loss that leave them finite{suffix}"
        )

    def _failure_text(self) -> str:
        first = self.differing[0]
        text = f"{len(self.differing)} of {len(self.rows)} values differ; the first is {first.kind} {first.name}"
        text += f" on stage {', '.join(map(str, first.stages))}" if first.stages else ""
        step, remedy = f", in step {first.step}" if first.step else "", ""
        amount = f"by {first.max_difference:.3g} (largest entry on one device {first.max_reference:.3g})"
        if first.verdict in ("missing", "unexpected"):
            amount = f"{first.verdict} in the pipeline"
        elif math.isinf(first.max_difference) and math.isfinite(first.max_reference):
            amount = "one is NaN or infinite where the other is not, or NaN where it is infinite"
            remedy = ". If values overflow, scale the loss down, or use a wider dtype"
        text = f"{text}: {amount}{step}{remedy}"
        return text if self.first is None else f"{self.first.text}. Downstream, {text}"

    def raise_if_failed(self) -> VerificationReport:
        """Return itself. Raise VerificationError, with the summary, unless everything is equal."""
        if not self.ok:
            raise VerificationError(self.summary())
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        full_batch = None if self.full_batch is None else {**asdict(self.full_batch), "text": self.full_batch.text}
        return {**asdict(self), "full_batch": full_batch, "ok": self.ok, "summary": self.summary()}


def compare(
    kind: str,
    name: str,
    stages: tuple[int, ...],
    value: Tensor | None,
    expected: Tensor | None,
    exact: bool,
    reordered: str = "",
    terms: Tensor | None = None,
    computed_in: torch.dtype | None = None,
    rounded: Tensor | None = None,
    noise: float = 0.0,
) -> Comparison:
    """Compare one tensor with that of the unsplit model; either may be absent.

    Args:
        exact: demand equality to the bit. If not, `computed_in`, `rounded` and `noise` count.
        reordered: why terms may have been added in another order; empty if they must not be.
        terms: for each entry, the sum of the sizes of its terms; None if unknown.
        computed_in: the dtype in which its terms were computed; None: the tensor's dtype.
        rounded: for each entry, the sum of the sizes that are rounded when its terms are added; see `RoundingBounds`.
        noise: how far the tensor of the unsplit model is from its full-precision value.
    """
    result = partial(Comparison, kind, name, stages)
    if value is None or expected is None:
        return result("equal" if value is expected else "missing" if value is None else "unexpected")
    value, expected = _to_dense(value), _to_dense(expected)
    if value.shape != expected.shape or value.dtype != expected.dtype:
        return result("different", math.inf, math.inf)
    is_numeric, largest = expected.is_floating_point() or expected.is_complex(), _max_abs(expected)
    if _equal_bits(value, expected):
        return result("equal" if not is_numeric or _is_conclusive(kind, expected) else "undefined", 0.0, largest)
    wide_value, wide_expected = _to_double(value), _to_double(expected)
    both_finite = wide_value.isfinite() & wide_expected.isfinite()
    if not _equal_bits(wide_value[~both_finite], wide_expected[~both_finite]):  # no tolerance covers them
        return result("different", math.inf, largest)
    differences = (_zero_nonfinite(wide_value) - _zero_nonfinite(wide_expected)).abs()
    difference = float(differences.max())
    close = partial(result, "close", difference, largest)
    tied_tolerance = max(TIED_TOLERANCE, TIED_EPSILONS * torch.finfo(expected.dtype).eps) if is_numeric else 0.0
    if is_numeric and reordered and difference <= tied_tolerance * largest:
        return close(reordered)
    usable_terms = terms if is_numeric and reordered and terms is not None and terms.shape == expected.shape else None
    if usable_terms is not None and (differences <= tied_tolerance * _zero_nonfinite(usable_terms)).all():
        return close(reordered, max_terms=_max_abs(usable_terms))
    if is_numeric and not exact:
        dtype = computed_in or expected.dtype
        relative, absolute = TOLERANCES.get(dtype, (1.3e-6, 1e-5))
        absolute_limit = min(absolute, max(absolute, TIED_EPSILONS * torch.finfo(dtype).eps) * largest)
        limits = absolute_limit + NOISE_FACTOR * noise + relative * _zero_nonfinite(wide_expected).abs()
        if rounded is not None and rounded.shape == expected.shape:
            limits += torch.finfo(expected.dtype).eps * _zero_nonfinite(rounded)
        if (differences <= limits).all():
            return close("not demanded to the bit here")
    return result("different", difference, largest)


def measure_noise(low: Mapping[Key, Tensor | None], full: Mapping[Key, Tensor | None]) -> dict[Key, float]:
    """Measure the largest difference of each floating-point value from its full-precision value; finite entries
    only."""
    pairs = ((key, value, full.get(key)) for key, value in low.items())
    return {
        key: _max_abs(_to_double(_to_dense(value)) - _to_double(_to_dense(precise)))
        for key, value, precise in pairs
        if value is not None and precise is not None and value.is_floating_point() and value.shape == precise.shape
    }


def merge_rows(rows: Iterable[Comparison]) -> dict[Key, Comparison]:
    """Merge rows to one for each value: the first failing one, or the one with the largest difference."""
    by_key: dict[Key, Comparison] = {}
    for row in rows:
        earlier = by_key.setdefault((row.kind, row.name), row)
        if earlier.ok and (not row.ok or row.max_difference > earlier.max_difference):
            by_key[row.kind, row.name] = row
    return by_key


def _is_conclusive(kind: str, values: Tensor) -> bool:
    """Whether equality of these values is conclusive. NaN hides any error; masks may be infinite, and buffers NaN
    until they are set."""
    if kind == "buffer" or not values.numel():
        return True
    values = values if values.itemsize > 1 else _to_double(values)  # torch lacks `isfinite` of some
    return not bool(values.isnan().all()) if kind == "output" else bool(values.isfinite().any())


def _equal_bits(value: Tensor, expected: Tensor) -> bool:
    """Whether bits are equal, so that -0 differs from 0. All NaNs are equal, since hardware leaves their bits open."""
    if value.is_complex():
        value, expected = torch.view_as_real(value), torch.view_as_real(expected)
    if same_bits(value, expected) or not expected.is_floating_point():
        return same_bits(value, expected)
    return bool(expected.isnan().any()) and same_bits(
        *(t.double().masked_fill(t.isnan(), math.nan) for t in (value, expected))
    )


def _zero_nonfinite(wide: Tensor) -> Tensor:
    """Replace entries that are not finite by 0."""
    return torch.where(wide.isfinite(), wide, torch.zeros_like(wide))


def _to_double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128) if tensor.is_complex() else tensor.double()


def _to_dense(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return tensor.resolve_conj().resolve_neg() if tensor.layout == torch.strided else tensor.to_dense()


def _max_abs(tensor: Tensor) -> float:
    is_plain = tensor.dtype in (torch.float32, torch.float64) and tensor.numel()
    if is_plain and math.isfinite(maximum := float(tensor.abs().max())):  # without a copy in double precision
        return maximum
    return float(_zero_nonfinite(_to_double(tensor)).abs().max()) if tensor.numel() else 0.0
