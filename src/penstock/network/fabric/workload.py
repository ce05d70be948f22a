"""What a job sends in one step: the transfers in order, each with the computation before it."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, Self

from penstock._base.errors import ArgumentError
from penstock._base.files import STRICT
from penstock.network.fabric.steps import REDUCES, Collective
from penstock.network.quantities import size_text

BYTES = {
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
}  # fmt: skip
"""The size of one element of each type, in bytes."""

DEFAULT_DTYPES = {1: "uint8", 2: "float16", 4: "float32", 8: "float64"}
"""The default type for each element size in bytes."""

NCCL = {"float16": "half", "float32": "float", "float64": "double"}
"""nccl-tests' names, where they differ."""

Op = Literal["sum", "prod", "min", "max", "avg"]

MAX_SECONDS = 1e9
MAX_SIZES = 1000
"""The most sizes in a sweep."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One collective, or one message.

    Attributes:
        name: the name of the layer, the parameter or the message; unique within a workload.
        bytes: the size as nccl-tests defines it: of a rank's largest buffer (all_gather, gather: the gathered result;
            reduce_scatter, all_to_all: what each rank contributes).
        collective: the operation.
        ranks: the participants, with the root (or sender) first; empty for all hosts.
        compute_seconds: how long its ranks compute between the previous transfer and this one.
        compute_by_rank: the same for each of `ranks`, in their order, if they differ; otherwise empty.
        shares: for an uneven all_to_all, how much goes to each of `ranks`, in their order; empty if all get the same.
        kind: what it carries: gradient, activation, activation gradient, tied gradient, parameters...; empty if
            unspecified, as for sizes given by hand.
    """

    __pydantic_config__ = STRICT
    name: str
    bytes: int
    collective: Collective = "all_reduce"
    ranks: tuple[int, ...] = ()
    compute_seconds: float = 0.0
    kind: str = "gradient"
    compute_by_rank: tuple[float, ...] = ()
    shares: tuple[int, ...] = ()

    def members(self, hosts: int) -> tuple[int, ...]:
        """Return the participants, of so many hosts."""
        return self.ranks or tuple(range(hosts))

    def compute_on(self, host: int) -> float:
        """Return how long a host computes before this transfer, in seconds."""
        return self.compute_by_rank[self.ranks.index(host)] if self.compute_by_rank else self.compute_seconds

    def fits(self, hosts: int) -> bool:
        """Whether ranks, compute times and shares go together, among so many hosts (0: any number)."""
        ranks, shares = self.ranks, self.shares
        return (
            len(set(ranks)) == len(ranks) != 1
            and (not hosts or all(0 <= rank < hosts for rank in ranks))
            and len(self.compute_by_rank) in (0, len(ranks))
            and (not shares or self.collective == "all_to_all")
            and (not shares or (len(shares) == (len(ranks) or hosts) and min(shares) >= 0 and any(shares)))
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The transfers of one trial.

    Attributes:
        name: what it was made from.
        hosts: the number of hosts it needs; 0 for any number.
        transfers: in order of execution.
        element_bytes: the size of one element; all sizes are multiples of it.
        dtype: the type of the elements; empty for the default type of this size.
        op: the reduction op, for collectives that reduce.
        compute_seconds: computation after the last transfer, up to the end of the step.
        notes: what a reader must know about how it was made.

    Raises:
        ArgumentError: there is nothing to send, a size is 0 or not a multiple of an element, names repeat, or ranks are
            not among the hosts.
    """

    __pydantic_config__ = STRICT
    name: str
    transfers: tuple[Transfer, ...]
    hosts: int = 0
    element_bytes: int = 4
    compute_seconds: float = 0.0
    notes: tuple[str, ...] = ()
    dtype: str = ""
    op: Op = "sum"

    def __post_init__(self) -> None:
        if self.element_bytes not in (1, 2, 4, 8):
            raise ArgumentError(f"element_bytes is {self.element_bytes}: pass 1, 2, 4 or 8")
        if self.dtype and BYTES.get(self.dtype) != self.element_bytes:
            raise ArgumentError(
                f"dtype is {self.dtype!r}, but element_bytes is {self.element_bytes}: pass a dtype of that size"
            )
        if self.op == "avg" and "float" not in self.type_name:
            raise ArgumentError(f"{self.type_name} cannot hold an average: pass op='sum', or a dtype like 'float32'")
        if self.op != "sum" and not any(transfer.collective in REDUCES for transfer in self.transfers):
            raise ArgumentError(f"op is {self.op!r}, but no transfer reduces: only {', '.join(REDUCES)} do")
        if not self.transfers:
            raise ArgumentError(f"the workload {self.name!r} has no transfers: pass at least one size")
        names: set[str] = set()
        for transfer in self.transfers:
            if transfer.bytes < 1 or transfer.bytes % self.element_bytes:
                raise ArgumentError(
                    f"the transfer {transfer.name} has {transfer.bytes} bytes: pass a multiple of the element size, "
                    f"{self.element_bytes} bytes, above 0"
                )
            if transfer.name in names:
                raise ArgumentError(f"two transfers are called {transfer.name!r}: use a different name for each")
            names.add(transfer.name)
            for seconds in (self.compute_seconds, transfer.compute_seconds, *transfer.compute_by_rank):
                if not 0 <= seconds <= MAX_SECONDS:
                    raise ArgumentError(f"{transfer.name}: compute time {seconds:g} s: expected 0 to {MAX_SECONDS:g} s")
            if not transfer.fits(self.hosts):
                raise ArgumentError(
                    f"{transfer.name} is between the ranks {transfer.ranks} of {self.hosts or 'any'} hosts, with the "
                    f"shares {transfer.shares} and compute times {transfer.compute_by_rank}: pass two or more ranks, "
                    "each once; a time for each, or none; and only for an all_to_all shares, integers >= 0, not all 0"
                )

    @property
    def computes(self) -> bool:
        """Whether there is computation before or after a transfer."""
        before = (seconds for t in self.transfers for seconds in (t.compute_seconds, *t.compute_by_rank))
        return any((self.compute_seconds, *before))

    @property
    def type_name(self) -> str:
        """The type of the elements that are sent."""
        return self.dtype or DEFAULT_DTYPES[self.element_bytes]

    @classmethod
    def from_sizes(cls, sizes: Iterable[int], collective: Collective = "all_reduce", element_bytes: int = 4) -> Self:
        """Make one transfer per size, in the given order, named after it; a repeated size gets a number in its name.

        A message goes from rank 0 to rank 1.
        """
        ranks = (0, 1) if collective == "send" else ()
        transfers, counts = [], Counter[int]()
        for size in sizes:
            counts[size] += 1
            suffix = f" #{counts[size]}" if counts[size] > 1 else ""
            transfers.append(Transfer(size_text(size) + suffix, size, collective, ranks, kind=""))
        return cls("sizes", tuple(transfers), element_bytes=element_bytes)

    @classmethod
    def sweep(
        cls, first: int, last: int, factor: float = 2, collective: Collective = "all_reduce", element_bytes: int = 4
    ) -> Self:
        """Make a sweep of sizes from `first` to `last`, each `factor` times the previous one, in whole elements. Raises
        ArgumentError: the factor is not above 1, the sweep is empty or too long, or `first` is not whole elements."""
        if not factor > 1:
            raise ArgumentError(f"factor is {factor}: pass a factor above 1")
        if last < first:
            raise ArgumentError(f"a sweep from {first} to {last} bytes is empty: pass the smaller size first")
        if first < 1 or first % element_bytes:
            raise ArgumentError(
                f"a sweep from {first} bytes: pass a multiple of the element size, {element_bytes} bytes, above 0"
            )
        if math.log(last / first) > MAX_SIZES * math.log(factor):
            raise ArgumentError(f"factor is {factor}: a sweep from {first} to {last} has more than {MAX_SIZES:,} sizes")
        sizes, size = [], float(first)
        while size <= last * (1 + 1e-9):
            sizes.append(min(round(size), last) // element_bytes * element_bytes)
            size *= factor
        return cls.from_sizes(sorted(set(sizes)), collective, element_bytes)


def parse_dtype(text: str) -> str:
    """Return torch's name of a type, given torch's or nccl-tests'. Raise ArgumentError if it is unknown."""
    name = {nccl_name: torch_name for torch_name, nccl_name in NCCL.items()}.get(text, text)
    if name not in BYTES:
        raise ArgumentError(f"there is no dtype {text!r}: pass one of {', '.join(BYTES)}")
    return name


# -- a known job -------------------------------------------------------------------------------------------------------

MLP_WIDTHS = (784, 256, 128, 64, 10)
"""The layer widths, input first, of the classic classifier of 28 x 28 images into ten digits."""


def mlp() -> Workload:
    """Return data-parallel training of fully connected layers, which all-reduces one layer's gradients after another.

    The backward pass computes the last layer's gradients first, so a step sends fc4, fc3, fc2, fc1: 2600, 33024, 131584
    and 803840 bytes.
    """
    layers = [(f"fc{n}", (inputs + 1) * outputs) for n, (inputs, outputs) in enumerate(pairwise(MLP_WIDTHS), start=1)]
    return Workload(
        name=f"mlp {'-'.join(map(str, MLP_WIDTHS))}",
        transfers=tuple(Transfer(name, count * BYTES["float32"]) for name, count in reversed(layers)),
        notes=("each layer's weight and bias gradients in float32, in the order the backward computes them",),
    )


# -- groups of transfers that differ only in microbatch or replica: a row of a table, a curve of a plot ----------------

_ONE_OF_MANY = re.compile(r"^[FB]\d+ | of replica \d+| of microbatch \d+")
"""The part of a name that distinguishes the members of a group."""
_NUMBERED = re.compile(r"(?<=\.)\d+(?![^.,;])|^\d+(?=\.)")
"""A module whose name is a number, like an item of a list, with other modules above or below it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Similar transfers of a workload.

    Attributes:
        name: the common part of their names.
        indices: their positions in the workload, in order of execution.
    """

    name: str
    indices: tuple[int, ...]


def groups(workload: Workload) -> list[Group]:
    """Group all transfers of a workload, ordered by each group's first transfer."""
    return _group(workload, _common_name)


def group_similar_layers(workload: Workload) -> list[Group]:
    """Group transfers as `groups` does, and merge layers that differ only in one module number: h.*.attn."""
    merged = _group(workload, lambda name: wildcard_name(_common_name(name)))
    originals = [{_common_name(workload.transfers[index].name) for index in group.indices} for group in merged]
    return [
        Group(next(iter(names)) if len(names) == 1 else group.name, group.indices)
        for group, names in zip(merged, originals, strict=True)
    ]


def wildcard_name(name: str) -> str:
    """Replace the outermost module number of each word by `*`, so that similar layers get the same name."""
    return re.sub(r"\S+", lambda word: _NUMBERED.sub("*", word[0], count=1), name)


def merge_similar_names(texts: Iterable[str]) -> list[str]:
    """Merge texts that differ only in their modules' numbers."""
    originals: dict[str, list[str]] = {}
    for text in texts:
        originals.setdefault(wildcard_name(text), []).append(text)
    return [group[0] if len(group) == 1 else common for common, group in originals.items()]


def _common_name(name: str) -> str:
    return _ONE_OF_MANY.sub("", name)


def _group(workload: Workload, rename: Callable[[str], str]) -> list[Group]:
    indices: dict[tuple[object, ...], list[int]] = {}
    for index, t in enumerate(workload.transfers):
        key = (rename(t.name), t.kind, t.collective, t.bytes, len(t.ranks), t.shares)
        indices.setdefault(key, []).append(index)
    return [Group(str(key[0]), tuple(members)) for key, members in indices.items()]
