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
from penstock.network.fabric.workload import Transfer, like_as_one


@dataclass(frozen=True, slots=True)
class Group:
    """Matrices that belong together: those with the same input, divided by outputs, and their partner, if any.

    Attributes:
        columns: divided by their outputs.
        row: divided by its inputs, which are the outputs of one of `columns`; None: those are gathered.
    """

    columns: tuple[Product, ...]
    row: Product | None

    @property
    def whole(self) -> bool:
        """Whether it is an attention, which contains both."""
        return self.columns[0].features is None

    @property
    def gathered(self) -> bool:
        """Whether an all-gather combines its output."""
        return self.row is None and not self.whole and not self.columns[0].looks_up


def groups(products: Sequence[Product]) -> list[Group]:
    """Return all groups of a forward, in order."""
    alike: list[list[Product]] = []
    for product in products:
        if alike and product.again and _is_matrix(product) and _is_matrix(alike[-1][0]):
            alike[-1].append(product)
        else:
            alike.append([product])
    made: list[Group] = []
    while alike:
        columns = tuple(alike.pop(0))
        row = alike[0][0] if alike and len(alike[0]) == 1 and _follows(columns, alike[0][0]) else None
        if row is not None:
            alike.pop(0)
        made.append(Group(columns, row))
    return made


def _follows(columns: Sequence[Product], row: Product) -> bool:
    """Whether a matrix takes the output of others in the same block: below one module, or below two of one module.

    Below one module their output may be several times as wide: queries, keys and values in one matrix.
    """
    near = _above(row.name)
    for one in columns:
        if one.features is None or row.features is None or one.looks_up or row.looks_up:
            return False
        beside, made, taken = _above(one.name), one.features[1], row.features[0]
        if made % taken == 0 if beside == near else made == taken and _above(beside) == _above(near) != "":
            return True
    return False


def _is_matrix(product: Product) -> bool:
    return product.features is not None and not product.looks_up


def _above(name: str) -> str:
    return name.rpartition(".")[0]


def transfers(products: Sequence[Product], microbatches: int, seconds: float = 0.0) -> list[Transfer]:
    """Return the transfers of a step, in order: each microbatch's forward and its backward. What a forward sends shares
    its seconds, and what a backward sends twice as many."""
    every = groups(products)
    made = []
    for number in range(microbatches):
        of = f" of microbatch {number}" if microbatches > 1 else ""
        for sent, whole in ((list(_forward(every)), seconds), (list(_backward(every)), 2 * seconds)):
            made += [replace(one, name=one.name + of, compute_seconds=whole / len(sent)) for one in sent]
    return made


def notes(products: Sequence[Product]) -> tuple[str, ...]:
    """Explain how each layer is divided, and where that differs from Megatron-LM."""
    every = groups(products)
    pairs = [f"{', '.join(one.name for one in g.columns)} with {g.row.name}" for g in every if g.row is not None]
    alone = [one.name for g in every if g.row is None for one in g.columns if not one.looks_up]
    divided = _divided(every)
    shared = [g.columns[0].name for g in every if g.columns[0].looks_up and g.columns[0].matrix in divided]
    whole = [g.columns[0].name for g in every if g.columns[0].looks_up and g.columns[0].matrix not in divided]
    said = {
        "divided by columns and rows": "; ".join(like_as_one(pairs)),
        "divided by columns, and gathered": ", ".join(like_as_one(alone)),
        "embeddings that stay whole on each host": ", ".join(whole),
        "embeddings that are divided, since their matrix is: an all-reduce follows": ", ".join(shared),
    }
    found = [f"{what}: {which}" for what, which in said.items() if which]
    last = next((group for group in reversed(every) if not group.columns[0].looks_up), None)
    if last is not None and last.gathered:  # the last matrix, which produces a language model's logits
        outputs = sum(one.made_bytes for one in last.columns)
        total = sum(one.bytes for one in (*_forward(every), *_backward(every)))
        found.append(
            f"{outputs / total:.0%} of the bytes are the outputs of {', '.join(one.name for one in last.columns)}, the "
            "last matrix, gathered whole: of logits Megatron-LM sends next to nothing, since its loss takes them "
            "divided"
        )
    return tuple(found)


def _divided(every: Sequence[Group]) -> dict[str, bool]:
    """Return the divided matrices, and for each whether it is divided by rows, that is, by its inputs."""
    found = {one.matrix: False for group in every for one in group.columns if not one.looks_up}
    return found | {group.row.matrix: True for group in every if group.row is not None}


def _forward(every: Sequence[Group]) -> Iterator[Transfer]:
    divided, seen = _divided(every), Counter[str]()
    for group in every:
        columns: tuple[Product, ...] = group.columns if group.row is None else (group.row,)
        for one in columns:
            way: Collective = "all_reduce" if group.row is not None or group.whole else "all_gather"
            name = f"forward {one.name}"
            if one.looks_up:
                if one.matrix not in divided:
                    continue
                seen[one.name] += 1
                name += f", lookup {seen[one.name]}" if seen[one.name] > 1 else ", lookup"
                way = "all_gather" if divided[one.matrix] else "all_reduce"
            yield Transfer(name, one.made_bytes, way, kind="activation")


def _backward(every: Sequence[Group]) -> Iterator[Transfer]:
    """Yield what is sent where an input's gradient is needed: matrices with the same input add theirs up before
    sending."""
    for group in reversed(every):
        first = group.columns[0]
        if first.trains:
            yield Transfer(f"backward {first.name}", first.given_bytes, "all_reduce", kind="activation gradient")
