"""Lists and arrays with one entry per row are cut as tensors are: in inputs and targets, whatever the entries are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import ShapeError, pipeline, verify
from penstock._base.pytree import leaf_tensors
from scaffolding.models import squared_error
from scaffolding.proofs import close
from scaffolding.small import mlp

ROWS, COUNTS = 6, [3, 1, 4, 1, 5, 9]


@dataclass
class Lengths:
    counts: list[int]


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


PER_ROW: dict[str, tuple[Any, Callable[[Any], list[Any]]]] = {
    "list": (COUNTS, list),
    "texts": (["a" * n for n in COUNTS], lambda meta: [len(text) for text in meta]),
    "dicts": ([{"boxes": random(n, 4)} for n in COUNTS], lambda meta: [one["boxes"].sum() for one in meta]),
    "tensors": (tuple(random(n, 4) for n in COUNTS), lambda meta: [one.sum() for one in meta]),
    "array": (np.array(COUNTS), list),
    "nested": ({"a": {"b": COUNTS}}, lambda meta: meta["a"]["b"]),
    "object": (Lengths(COUNTS), lambda meta: meta.counts),
}


class Ends(nn.Module):
    """Two layers, and something between."""

    def __init__(self, width: int = 5, out: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, 5), nn.Linear(5, out)


class Weighed(Ends):
    """Weighs each row by a number."""

    def __init__(self, read: Callable[[Any], list[Any]]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, meta: Any) -> Tensor:
        hidden = self.first(x)
        weights = torch.stack([torch.as_tensor(number).float() for number in self.read(meta)])
        output: Tensor = self.last(hidden * weights.view(-1, 1))
        return output


@pytest.mark.filterwarnings("ignore:.*values, is cut:UserWarning")
@pytest.mark.parametrize("name", PER_ROW)
def test_each_microbatch_gets_its_entries(name: str) -> None:
    meta, read = PER_ROW[name]
    inputs = ((random(ROWS, 5),), {"meta": meta})
    close(verify(Weighed(read), *inputs, target=random(ROWS, 5), loss_fn=squared_error, ranks=2, microbatches=4))


@pytest.mark.parametrize("name", ["list", "dicts", "tensors", "object"])
def test_so_does_the_loss(name: str) -> None:
    target, read = PER_ROW[name]

    def loss(output: Tensor, target: Any) -> Tensor:
        return F.mse_loss(output, torch.tensor([float(n) for n in read(target)]).view(-1, 1).expand_as(output))

    close(verify(mlp(), (random(ROWS, 9),), target=target, loss_fn=loss, ranks=2, microbatches=4))


class Resized(Ends):
    """Its plain values belong to no row."""

    def forward(self, x: Tensor, size: Any, names: Any = ()) -> Tensor:
        output: Tensor = self.last(self.first(x).expand(*size, *x.shape).sum((0, 1)))
        return output * (1 + len(names))


def test_a_list_goes_whole_where_the_examples_does() -> None:
    """A smaller batch has as many rows as the list has entries."""
    x, y, model = random(ROWS, 5), random(ROWS, 5), Resized()
    names = ["a", "b", "c", "d"]
    with pipeline(model, (x, (2, 3), names), loss_fn=squared_error, ranks=2, microbatches=2) as pipe:
        for rows in (6, 4, 2):
            expected = squared_error(model(x[:rows], (2, 3), names), y[:rows])
            torch.testing.assert_close(pipe.step(x[:rows], (2, 3), names, target=y[:rows]).loss, expected.detach())


def test_a_list_of_features_is_cut_in_each() -> None:
    """As models with several inputs take them, even if there are as many as rows."""
    x, y, features = random(4, 5), random(4, 5), [random(4, 2) * n for n in (1, 2, 3, 4)]
    model = Weighed(lambda meta: list(sum(meta).sum(1)))
    close(verify(model, (x, features), target=y, loss_fn=squared_error, ranks=2, microbatches=2))


# -- what messages tell ----------------------------------------------------------------------------------------------


OF_THE_BATCH = torch.ones(8, 1)


class Scaled(Ends):
    def forward(self, x: Tensor, scale: Tensor = OF_THE_BATCH) -> Tensor:
        output: Tensor = self.last(self.first(x) * scale)
        return output


class Rotary(nn.Module):
    """Positions in three dimensions, as Qwen2-VL has them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 5), nn.Linear(5, 5)

    def forward(self, ids: Tensor, position_ids: Tensor) -> Tensor:
        time, height, width = position_ids
        output: Tensor = self.last(self.embedding(ids) + self.embedding(time + height + width))
        return output


@pytest.mark.parametrize(
    ("model", "args", "words"),
    [
        (Scaled(), (random(8, 5),), r"8 rows in 4 microbatches; the first got args\[0\] \[2, 5\]\..*default argument"),
        (
            Rotary(),
            (torch.ones(4, 7, dtype=torch.int64), torch.ones(4, 4, 7, dtype=torch.int64)),
            r"4 rows in 4 microbatches; the first got args\[0\] \[1, 7\], args\[1\] \[1, 4, 7\]\..*batch_dims=",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.Flatten()),
            ([random(4, 4, 4) for _ in range(8)],),
            r"4 rows in 4 microbatches; the first got args\[0\]\[0\] \[1, 4, 4\].*list of images.*split_fn=",
        ),
    ],
)
def test_a_model_that_cannot_take_a_microbatch_is_told_how_the_batch_was_cut(
    model: nn.Module, args: tuple[Any, ...], words: str
) -> None:
    with pytest.raises(Exception, match=r".") as caught:  # whatever the model raises
        pipeline(model, args, loss_fn=squared_error, ranks=2, microbatches=4)
    assert any(re.search(words, note) for note in caught.value.__notes__), caught.value.__notes__


@pytest.mark.parametrize(
    ("made", "kind"),
    [
        (lambda rows: rows.to_sparse(), "sparse"),
        (lambda rows: rows.to_sparse_csr(), "sparse"),
        (lambda rows: torch.nested.nested_tensor([*rows], layout=torch.jagged), "nested"),
    ],
)
@pytest.mark.parametrize("batch_dims", [None, {"kwargs": {"scale": None}}])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
def test_tensors_that_are_not_dense_are_named(made: Callable[[Tensor], Tensor], kind: str, batch_dims: Any) -> None:
    """Sparse adjacencies among the inputs, as pygcn passes them."""
    inputs = ((random(8, 5),), {"scale": made(random(8, 5))})
    with pytest.raises(ShapeError, match=rf"\['scale'\] is a {kind} tensor; expected a dense one"):
        pipeline(Scaled(), *inputs, loss_fn=squared_error, ranks=2, microbatches=4, batch_dims=batch_dims)


def test_what_becomes_of_lists_of_plain_values_is_noted() -> None:
    """They may as well be constants that every microbatch needs."""
    x, constants, model = random(ROWS, 5), [float(n) for n in COUNTS], Weighed(lambda meta: [sum(meta)] * ROWS)
    model.forward = lambda x, meta: model.last(model.first(x) * sum(meta))  # type: ignore[method-assign]
    options: dict[str, Any] = {"loss_fn": squared_error, "ranks": 2, "microbatches": 3}
    note = r"kwargs\['meta'\], a list of 6 values, is cut; .* pass batch_dims= with None for it"
    with pytest.warns(UserWarning, match=note):  # texts would not be constants
        pipe = pipeline(model, (x,), {"meta": constants}, **options)
    with pipe:
        assert [found for found in pipe.notes if re.match(note, found)]
    with pipeline(model, (x,), {"meta": constants}, **options, batch_dims={"meta": None}) as pipe:
        assert not [found for found in pipe.notes if re.match(note, found)]
        loss = pipe.step(x, meta=constants, target=x).loss
        torch.testing.assert_close(loss, squared_error(model(x, constants), x).detach())
    with pipeline(model, (x,), {"meta": constants}, **options, batch_dims={"meta": 0}) as pipe:
        assert not [found for found in pipe.notes if re.match(note, found)]
    note = r"kwargs\['meta'\], a list of 5 values, goes whole to each microbatch: the batch has 6 rows"
    with pipeline(model, (x,), {"meta": constants[1:]}, **options) as pipe:
        assert [found for found in pipe.notes if re.match(note, found)]


# -- what may be rows or not is asked for, and is cut as stated -------------------------------------------------------


class Pictured(Ends):
    """Takes pictures of any size, as torchvision's detection models do; or whatever has tensors like them."""

    def forward(self, images: list[Any]) -> Tensor:
        means = torch.stack([leaf_tensors(image)[0].float().mean((1, 2)) for image in images])
        output: Tensor = self.last(self.first(means))
        return output


class Added(Pictured):
    """Takes features, which it adds up."""

    def forward(self, features: list[Tensor]) -> Tensor:
        output: Tensor = self.last(self.first(sum(features).mean(1)))
        return output


class Rotated(Ends):
    """Takes positions [3, B, S], as Qwen2-VL does: rows that are left out broadcast."""

    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        output: Tensor = self.last(self.first(x) * (1 + position_ids.float().sum(0))[..., None])
        return output


def pictures(wrap: Callable[[Tensor], Any], rows: int = 3) -> list[Any]:
    """Their first dimension, the three colors, is not the batch."""
    return [wrap(random(3, 4, 5 + n)) for n in range(rows)]


ROW_OF = r"is each one row of the batch\?"
DICTS = [{"b": random(4, 2) * n} for n in (1, 2, 3, 4)]

ASKED: dict[str, tuple[nn.Module, tuple[Any, ...], str, Any]] = {
    "a size": (Resized(), (random(2, 5), (2, 3)), rf"\[1\] is a tuple of 2 ints: {ROW_OF}.*split_fn=", (0, None)),
    "rows that may be a size": (Weighed(list), (random(2, 5), (2, 3)), rf"a tuple of 2 ints: {ROW_OF}.*=", (0, 0)),
    "dicts": (
        Weighed(lambda meta: [one["b"].sum() for one in meta]),
        (random(4, 5), DICTS),
        rf"is a list of 4 dicts: {ROW_OF}",
        (0, 0),
    ),
    "dicts of rows": (
        Weighed(lambda meta: list(sum(one["b"] for one in meta).sum(1))),
        (random(4, 5), DICTS),
        rf"is a list of 4 dicts: {ROW_OF}",
        (0, [{"b": 0}] * 4),
    ),
    **{
        f"pictures: {name}": (Pictured(3, 2), (pictures(wrap, rows),), rf"is a list of {rows} \w+.*: {ROW_OF}", [0])
        for name, wrap, rows in (
            ("plain", lambda image: image, 3),
            ("more than colors", lambda image: image, 4),
            ("dicts", lambda image: {"image": image, "height": 4}, 3),
            ("bytes", lambda image: {"image": (100 * image).to(torch.uint8)}, 3),
            ("tuples", lambda image: (image, 1), 3),
            ("lists", lambda image: [image, image], 4),
        )
    },
    "features like pictures": (Added(3, 2), ([random(3, 4, 3)] * 2,), "a list with the dimension of each", [[0, 0]]),
    "positions of three kinds": (
        Rotated(),
        (random(3, 4, 5), torch.arange(36).view(3, 3, 4) % 5),
        r"\[3, 3, 4\] has the batch's 3 rows in dimension 0 or 1; pass",
        (0, 1),
    ),
}


@pytest.mark.parametrize("name", ASKED)
def test_what_may_be_rows_is_asked_for_and_cut_as_stated(name: str) -> None:
    model, args, words, dims = ASKED[name]
    y = model(*args).detach() + 1
    options: dict[str, Any] = {"loss_fn": squared_error, "ranks": 2, "microbatches": len(y)}
    with pytest.raises(ShapeError, match=words):
        pipeline(model, args, **options)
    with pipeline(model, args, **options, batch_dims={"args": dims}) as pipe:
        result = pipe.step(*args, target=y)
    assert result.sizes == (1,) * len(y)
    torch.testing.assert_close(result.loss, squared_error(model(*args), y).detach())


class Boxed(Ends):
    """Its loss looks at each row's objects, as those of DETR and Mask2Former do."""

    def forward(self, x: Tensor, objects: list[Tensor]) -> Tensor:
        rows = self.last(self.first(x))
        losses = [squared_error(row.expand_as(boxes), boxes) for row, boxes in zip(rows, objects, strict=True)]
        return torch.stack(losses).mean()


def test_objects_of_each_row_may_be_as_many_as_rows() -> None:
    """In a later batch, or as `batch_dims` says; and the objects of a single row have no rows."""
    model = Boxed(5, 4)
    batches = [(random(2, 5), [random(n, 4) for n in counts]) for counts in ((1, 3), (2, 2))]
    batches.append((random(1, 5), [random(3, 4)]))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 2}
    with pipeline(model, batches[0], **options) as pipe, pipeline(model, batches[2], **options) as single:
        for batch in batches:
            torch.testing.assert_close(pipe.step(*batch).loss, model(*batch).detach())
        torch.testing.assert_close(single.step(*batches[2]).loss, model(*batches[2]).detach())
    with pipeline(model, batches[1], **options, batch_dims={"args": (0, 0)}) as pipe:
        torch.testing.assert_close(pipe.step(*batches[1]).loss, model(*batches[1]).detach())


@pytest.mark.parametrize("stated", [{}, {"batch_dims": {"args": (0,)}}])
def test_samples_of_one_length_are_samples_as_in_the_example(stated: dict[str, Any]) -> None:
    """Those of the example differ in length: that of a later batch's is no number of rows."""

    def forward(samples: list[Tensor]) -> Tensor:
        output: Tensor = model.last(torch.stack([model.first(sample).mean(0) for sample in samples]))
        return output

    model, y = Resized(), random(4, 5)
    model.forward = forward  # type: ignore[method-assign, assignment]
    example, options = [random(n, 5) for n in (3, 1, 2, 4)], {"loss_fn": squared_error, "ranks": 2, "microbatches": 2}
    with pipeline(model, (example,), **options, **stated) as pipe:
        for batch in (example, *([random(n, 5) for n in each] for each in ((6, 6, 6, 6), (4, 4, 4, 4), (2, 3, 2, 5)))):
            result = pipe.step(batch, target=y)
            assert result.sizes == (2, 2)
            torch.testing.assert_close(result.loss, squared_error(forward(batch), y).detach())
