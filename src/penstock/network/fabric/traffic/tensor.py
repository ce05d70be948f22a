"""What tensor parallelism sends: each layer's matrix is divided among all hosts, which combine activations.

A matrix divided by its outputs (columns) needs its whole input, and leaves its result in pieces; one divided by its
inputs (rows) takes pieces, and its result is a sum over hosts. So two in a row need one all-reduce in the forward,
after the second, and one in the backward, before the first, as in Megatron-LM (M. Shoeybi and others, 2019): queries,
keys and values, and then the output; the two layers of an MLP. A matrix without such a partner is divided by its
outputs, which an all-gather combines. This includes a language model's logits, which Megatron-LM leaves in pieces
because its loss takes them that way. Embeddings, norms and the rest stay whole on each host, except an embedding whose
matrix is also multiplied by: each host looks up its part, and an all-reduce adds the parts up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from penstock.network.fabric.steps import Collective
from penstock.network.fabric.traffic.layers import Product
from penstock.network.fabric.workload import Transfer, merge_similar_names


@dataclass(frozen=True, slots=True)
class MatrixGroup:
    """Matrices that belong together: those with the same input, divided by outputs, and their partner, if any.

    Attributes:
        columns: divided by their outputs.
        row: divided by its inputs, which are the outputs of one of `columns`; None: those are gathered.
    """

    columns: tuple[Product, ...]
    row: Product | None

    @property
    def is_attention(self) -> bool:
        """Whether it is an attention, which contains both."""
        return self.columns[0].features is None

    @property
    def is_gathered(self) -> bool:
        """Whether an all-gather combines its output."""
        return self.row is None and not self.is_attention and not self.columns[0].is_lookup


def groups(products: Sequence[Product]) -> list[MatrixGroup]:
    """Return all groups of a forward, in order."""
    runs: list[list[Product]] = []
    for product in products:
        if runs and product.same_input and _is_matrix(product) and _is_matrix(runs[-1][0]):
            runs[-1].append(product)
        else:
            runs.append([product])
    result: list[MatrixGroup] = []
    while runs:
        columns = tuple(runs.pop(0))
        row = runs[0][0] if runs and len(runs[0]) == 1 and _follows(columns, runs[0][0]) else None
        if row is not None:
            runs.pop(0)
        result.append(MatrixGroup(columns, row))
    return result


def _follows(columns: Sequence[Product], row: Product) -> bool:
    """Whether a matrix takes the output of others in the same block: below one module, or below two of one module.

    Below one module their output may be several times as wide: queries, keys and values in one matrix.
    """
    block = _above(row.name)
    for column in columns:
        if column.features is None or row.features is None or column.is_lookup or row.is_lookup:
            return False
        parent, out, into = _above(column.name), column.features[1], row.features[0]
        if out % into == 0 if parent == block else out == into and _above(parent) == _above(block) != "":
            return True
    return False


def _is_matrix(product: Product) -> bool:
    return product.features is not None and not product.is_lookup


def _above(name: str) -> str:
    return name.rpartition(".")[0]


def transfers(products: Sequence[Product], microbatches: int, seconds: float = 0.0) -> list[Transfer]:
    """Return the transfers of a step, in order: each microbatch's forward and its backward. What a forward sends shares
    its seconds, and what a backward sends twice as many."""
    all_groups = groups(products)
    result = []
    for number in range(microbatches):
        suffix = f" of microbatch {number}" if microbatches > 1 else ""
        for sent, total in ((list(_forward(all_groups)), seconds), (list(_backward(all_groups)), 2 * seconds)):
            result += [replace(t, name=t.name + suffix, compute_seconds=total / len(sent)) for t in sent]
    return result


def notes(products: Sequence[Product]) -> tuple[str, ...]:
    """Explain how each layer is divided, and where that differs from Megatron-LM."""
    all_groups = groups(products)
    pairs = [f"{', '.join(p.name for p in g.columns)} with {g.row.name}" for g in all_groups if g.row is not None]
    unpaired = [p.name for g in all_groups if g.row is None for p in g.columns if not p.is_lookup]
    divided = _divided(all_groups)
    shared = [g.columns[0].name for g in all_groups if g.columns[0].is_lookup and g.columns[0].matrix in divided]
    undivided = [g.columns[0].name for g in all_groups if g.columns[0].is_lookup and g.columns[0].matrix not in divided]
    sections = {
        "divided by columns and rows": "; ".join(merge_similar_names(pairs)),
        "divided by columns, and gathered": ", ".join(merge_similar_names(unpaired)),
        "embeddings that stay whole on each host": ", ".join(undivided),
        "embeddings that are divided, since their matrix is: an all-reduce follows": ", ".join(shared),
    }
    lines = [f"{heading}: {names}" for heading, names in sections.items() if names]
    last = next((group for group in reversed(all_groups) if not group.columns[0].is_lookup), None)
    if last is not None and last.is_gathered:  # the last matrix, which produces a language model's logits
        outputs = sum(p.output_bytes for p in last.columns)
        total = sum(transfer.bytes for transfer in (*_forward(all_groups), *_backward(all_groups)))
        lines.append(
            f"{outputs / total:.0%} of the bytes are the outputs of {', '.join(p.name for p in last.columns)}, the "
            "last matrix, gathered whole: of logits Megatron-LM sends next to nothing, since its loss takes them "
            "divided"
        )
    return tuple(lines)


def _divided(all_groups: Sequence[MatrixGroup]) -> dict[str, bool]:
    """Return the divided matrices, and for each whether it is divided by rows, that is, by its inputs."""
    by_rows = {product.matrix: False for group in all_groups for product in group.columns if not product.is_lookup}
    return by_rows | {group.row.matrix: True for group in all_groups if group.row is not None}


def _forward(all_groups: Sequence[MatrixGroup]) -> Iterator[Transfer]:
    divided, counts = _divided(all_groups), Counter[str]()
    for group in all_groups:
        columns: tuple[Product, ...] = group.columns if group.row is None else (group.row,)
        for product in columns:
            collective: Collective = "all_reduce" if group.row is not None or group.is_attention else "all_gather"
            name = f"forward {product.name}"
            if product.is_lookup:
                if product.matrix not in divided:
                    continue
                counts[product.name] += 1
                name += f", lookup {counts[product.name]}" if counts[product.name] > 1 else ", lookup"
                collective = "all_gather" if divided[product.matrix] else "all_reduce"
            yield Transfer(name, product.output_bytes, collective, kind="activation")


def _backward(all_groups: Sequence[MatrixGroup]) -> Iterator[Transfer]:
    """Yield what is sent where an input's gradient is needed: matrices with the same input add theirs up before
    sending."""
    for group in reversed(all_groups):
        first = group.columns[0]
        if first.input_requires_grad:
            yield Transfer(f"backward {first.name}", first.input_bytes, "all_reduce", kind="activation gradient")
