"""Batches that are not in the first dimension, or in none: stated by dimensions, or cut and merged by functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

import penstock
from penstock import ArgumentError, Microbatch, Microbatches, ShapeError, pipeline, verify
from penstock.runtime.batch.stated_dims import parse
from scaffolding.proofs import close

T, B, WIDTH, LAYERS, CLASSES = 6, 11, 5, 2, 4
M = {"ranks": 3, "microbatches": 4}
TWO = {"ranks": 2, "microbatches": 4}


class Recurrent(nn.Module):
    """[T, B, WIDTH] and an initial state [LAYERS, B, 8] in; logits [T, B, CLASSES], states and a mean out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)
        self.rnn = nn.LSTM(8, 8, LAYERS)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor], scale: Tensor | None = None) -> dict[str, Any]:
        output, (h, _) = self.rnn(self.embed(x), state)
        logits = self.head(output)
        if scale is not None:
            logits = logits * scale
        return {"logits": logits, "h": h, "mean": logits.mean(), "scale": scale, "first": logits[0]}


def entropy(output: dict[str, Any], target: Tensor) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), target.flatten())


DIMS: dict[str, Any] = {
    "args": 1,
    "kwargs": {"scale": None},
    "target": 1,
    "output": {"logits": 1, "h": 1, "mean": "mean", "scale": None},
}


def batch(rows: int = B) -> tuple[tuple[Any, ...], dict[str, Any], Tensor]:
    generator = torch.Generator().manual_seed(rows)
    state = (torch.randn(LAYERS, rows, 8, generator=generator), torch.randn(LAYERS, rows, 8, generator=generator))
    x = torch.randn(T, rows, WIDTH, generator=generator)
    scale = torch.rand(CLASSES, generator=generator)
    return (x, state), {"scale": scale}, torch.randint(CLASSES, (T, rows), generator=generator)


def recurrent() -> Recurrent:
    torch.manual_seed(0)
    return Recurrent()


@pytest.mark.parametrize("schedule", ["1f1b", "chimera"])
def test_a_batch_in_dimension_1_is_verified(schedule: str) -> None:
    args, kwargs, target = batch()
    counts = {**M, "ranks": 2} if schedule == "chimera" else M
    options = {**counts, "loss_fn": entropy, "batch_dims": DIMS, "schedule": schedule}
    close(verify(recurrent, args, target=target, kwargs=kwargs, **options))


def test_evaluation_and_prediction_put_outputs_together_leaf_by_leaf() -> None:
    args, kwargs, target = batch()
    model = recurrent()
    with pipeline(model, args, kwargs, loss=entropy, batch_dims=DIMS, **M) as pipe:
        for rows in (B, 3, 1, B):  # fewer rows than microbatches, too
            args, kwargs, target = batch(rows)
            whole = model(*args, **kwargs)
            found = pipe.predict(*args, outputs="all", **kwargs)
            for name in ("logits", "h", "mean"):
                torch.testing.assert_close(found[name], whole[name])
            assert torch.equal(found["scale"], kwargs["scale"])
            torch.testing.assert_close(found["first"], whole["first"])  # nothing is stated: its first dimension
            torch.testing.assert_close(pipe.evaluate(*args, target=target, **kwargs).loss, entropy(whole, target))
    dims = {**DIMS, "output": {**DIMS["output"], "mean": None}}
    with pipeline(recurrent(), args, kwargs, loss=entropy, batch_dims=dims, **M) as pipe:
        with pytest.raises(ShapeError, match=r"output\['mean'\] is not the same in all microbatches"):
            pipe.predict(*args, **kwargs)


def test_the_most_particular_statement_holds_in_torchs_own_words_too() -> None:
    inputs, target, output = parse({"args": 1, "kwargs": {"a": {"b": 2}, "c": None}, "output": {"x": "sum"}})
    assert [inputs.get(path) for path in ("[0][0]['x']", "[1]['a']['b'][3]", "[1]['a']", "[1]['c']")] == [1, 2, 0, None]
    assert (target.get("[0]"), output.get(".x"), output.get(".xy")) == (0, "sum", 0)
    assert parse({"a": None, "kwargs": {"b": 1}})[0].stated == (("[1]['b']", 1), ("[1]['a']", None))
    assert parse({"args": (_Replicate(), TensorChunkSpec(2))})[0].stated == (("[0][0]", None), ("[0][1]", 2))
    args, kwargs, target = batch()
    spec = {
        "args": (TensorChunkSpec(1), (TensorChunkSpec(1), TensorChunkSpec(1))),
        "kwargs": {"scale": _Replicate},
        "target": TensorChunkSpec(1),
    }
    verify(recurrent, args, target=target, loss_fn=entropy, kwargs=kwargs, batch_dims=spec, **M).raise_if_failed()


@pytest.mark.parametrize(
    ("dims", "words"),
    [
        ("first", r"batch_dims='first': expected a dimension for all, or a dict"),
        ({"inputs": 1}, r"batch_dims names input\[1\]\['inputs'\], but there is only input\[0\]\[0\]"),
        ({"kwargs": 1, "scale": None}, "expected a dimension for all, or a dict with any of 'args'"),
        ({"args": ("one",)}, r"batch_dims\['args'\]\[0\] is 'one'; expected a dimension, or None"),
        ({"kwargs": {"x": "mean"}}, r"batch_dims\['kwargs'\]\['x'\] is 'mean'; expected a dimension"),
        ({"args": 3}, r"example\[0\]\[0\] has shape \[6, 11, 5\], but .* in its dimension 3"),
        ({"args": (1, 0), "kwargs": None}, r"disagree on the number of rows: .*along dimension 1.*batch_dims="),
    ],
)
def test_wrong_dimensions_are_refused(dims: Any, words: str) -> None:
    args, kwargs, _ = batch()
    with pytest.raises((ArgumentError, ShapeError), match=words):
        pipeline(recurrent(), args, kwargs, loss=entropy, batch_dims=dims, **M)
    with pytest.raises((ArgumentError, ShapeError), match=words):
        penstock.inspect(recurrent(), args, kwargs, batch_dims=dims)


def test_a_target_of_other_rows_is_refused_along_its_dimension() -> None:
    args, kwargs, target = batch()
    with pipeline(recurrent(), args, kwargs, loss=entropy, batch_dims=DIMS, **M) as pipe:
        with pytest.raises(ShapeError, match=r"target has 10 rows \(shape \[6, 10\], dimension 1\); expected 11"):
            pipe.step(*args, target=target[:, :10], **kwargs)
    dims = {**DIMS, "target": {"y": 1}}
    with pipeline(recurrent(), args, kwargs, loss=entropy, batch_dims=dims, **M) as pipe:
        with pytest.raises(ArgumentError, match=r"batch_dims names target\['y'\], but there is only target"):
            pipe.step(*args, target=target, **kwargs)


def test_pieces_that_are_cut_already_count_rows_along_the_dimension() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES))
    pieces = [torch.randn(length, rows, WIDTH) for length, rows in ((6, 3), (4, 5))]
    targets = [torch.randint(CLASSES, piece.shape[:2]) for piece in pieces]
    with pipeline(model, (Microbatches(pieces),), ranks=2, microbatches=2, loss=flat, batch_dims=1) as pipe:
        result = pipe.step(Microbatches(pieces), target=Microbatches(targets))
        assert result.sizes == (3, 5)
        losses = [flat(model(piece), target) for piece, target in zip(pieces, targets, strict=True)]
        torch.testing.assert_close(result.loss, (losses[0] * 3 + losses[1] * 5) / 8)


def flat(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


# -- functions --------------------------------------------------------------------------------------------------------


class GraphNet(nn.Module):
    """Features of nodes, edges between them, and the graph of each node in; a value for each graph out."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(WIDTH, 8), nn.Linear(8, 8), nn.Linear(8, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor, owner: Tensor, graphs: int) -> Tensor:
        for layer in (self.one, self.two):
            nodes = torch.tanh(layer(nodes))
            nodes = nodes + torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        return self.head(torch.zeros(graphs, 8, dtype=nodes.dtype).index_add(0, owner, nodes))


SIZES = (3, 5, 2, 4, 4, 1, 6)


def graphs(sizes: tuple[int, ...] = SIZES) -> tuple[tuple[Any, ...], Tensor]:
    generator = torch.Generator().manual_seed(sum(sizes))
    owner = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    starts = torch.tensor(sizes).cumsum(0) - torch.tensor(sizes)
    edges = torch.cat([start + torch.randint(size, (2, 2 * size), generator=generator)
                       for start, size in zip(starts, sizes, strict=True)], 1)  # fmt: skip
    nodes = torch.randn(sum(sizes), WIDTH, generator=generator)
    return (nodes, edges, owner, len(sizes)), torch.randint(CLASSES, (len(sizes),), generator=generator)


def by_graphs(args: tuple[Any, ...], kwargs: dict[str, Any], target: Any, microbatches: int) -> list[Microbatch]:
    nodes, edges, owner, count = args
    pieces = []
    for some in torch.arange(count).chunk(microbatches):
        first, last = int(some[0]), int(some[-1])
        mine = (owner >= first) & (owner <= last)
        start = int(mine.nonzero()[0])
        inside = edges[:, mine[edges[0]]] - start
        wanted = None if target is None else target[first : last + 1]
        pieces.append(Microbatch((nodes[mine], inside, owner[mine] - first, len(some)), {}, wanted, len(some)))
    return pieces


def graph_net() -> GraphNet:
    torch.manual_seed(0)
    return GraphNet()


def test_graphs_are_cut_by_a_function() -> None:
    args, target = graphs()
    close(verify(graph_net, args, target=target, loss_fn=F.cross_entropy, split_fn=by_graphs, merge_fn=torch.cat, **M))


def test_other_graphs_are_recorded_anew_and_predictions_are_merged() -> None:
    args, _ = graphs()
    model, seen = graph_net(), list[int]()

    def merge(outputs: list[Tensor]) -> Tensor:
        seen.append(len(outputs))
        return torch.cat(outputs).flip(0)

    for merge_fn in (None, merge):
        options: dict[str, Any] = {"loss": F.cross_entropy, "split_fn": by_graphs, "merge_fn": merge_fn, **M}
        with pipeline(graph_net(), args, **options) as pipe:
            for sizes in (SIZES, (2, 2), SIZES[::-1], SIZES):
                args, target = graphs(sizes)
                expected = model(*args)
                predicted = pipe.predict(*args)  # without a function, rows of an output are the graphs
                torch.testing.assert_close(predicted.flip(0) if merge_fn else predicted, expected)
                torch.testing.assert_close(pipe.evaluate(*args, target=target).loss, F.cross_entropy(expected, target))
                assert pipe.evaluate(*args).losses == ()
    assert seen == [4, 2, 4, 4]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda *_: None, "split_fn= returned a NoneType; expected a list of penstock.Microbatch"),
        (lambda args, *_: [Microbatch(args, rows=1)] * 5, "5 microbatches were given, but the schedule is for 4"),
        (
            lambda args, *_: [Microbatch(args)] * 4,
            r"microbatch 0 of split_fn= has no rows=",
        ),
        (lambda args, *_: [Microbatch(args, rows=0)] * 4, "microbatch 0 of split_fn=: rows=0; expected an integer"),
        (lambda args, *_: [Microbatch(args[0], rows=1)] * 4, "args is a Tensor and kwargs a mappingproxy; expected"),
        ("rows", "split_fn='rows': expected a function, or None"),
    ],
)
def test_what_a_split_function_returns_is_checked(function: Any, words: str) -> None:
    args, _ = graphs()
    with pytest.raises((ArgumentError, ShapeError), match=words):
        pipeline(graph_net(), args, loss=F.cross_entropy, split_fn=function, **M)
    with pytest.raises(ArgumentError, match="merge_fn=1: expected a function, or None"):
        pipeline(graph_net(), args, loss=F.cross_entropy, split_fn=by_graphs, merge_fn=1, **M)  # type: ignore[arg-type]


# -- losses without a target ------------------------------------------------------------------------------------------


class OwnLoss(nn.Module):
    """A tuple with its loss and a measure that takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> list[Tensor]:
        logits = self.two(torch.tanh(self.one(x)))
        return [(logits.argmax(-1) == y).float().mean(), logits, F.cross_entropy(logits, y)]


def rows() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, WIDTH, generator=generator), torch.randint(CLASSES, (B,), generator=generator)


@pytest.mark.parametrize("recompute", ["never", "always"])
def test_the_one_scalar_that_requires_a_gradient_is_the_loss(recompute: Any) -> None:
    torch.manual_seed(0)
    model = OwnLoss()
    expected = float(model(*rows())[2].detach())
    assert verify(model, rows(), recompute=recompute, **TWO).raise_if_failed().loss == pytest.approx(expected, rel=1e-5)


def mean(output: Tensor) -> Tensor:
    return output.pow(2).mean()


def mean_of_two(output: Tensor, target: Any) -> Tensor:
    return output.pow(2).mean()


@pytest.mark.parametrize("loss", [mean, mean_of_two])
def test_a_loss_that_ignores_its_target_needs_none(loss: Any) -> None:
    x, _ = rows()
    model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, CLASSES))
    with pipeline(model, (x,), loss=loss, **TWO) as pipe:
        assert float(pipe.step(x).loss) == pytest.approx(mean(model(x)).item())
        assert pipe.needs_targets == (loss is mean_of_two)
        assert bool(pipe.evaluate(x).losses) == (loss is mean)  # which knows that it needs no target
    assert verify(model, (x,), loss=loss, **TWO).ok


def test_a_loss_of_other_arguments_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"loss_fn takes \(a, b, c\); expected loss_fn\(output, target\)"):
        pipeline(nn.Linear(WIDTH, 8), rows()[:1], loss=lambda a, b, c: a)  # type: ignore[misc,arg-type]
