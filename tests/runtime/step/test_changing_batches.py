"""Batches as they come, in one process: cut already, of any structure, with values that change, put together again.

Real ranks do the same in tests/distributed/test_changing.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree

import penstock
import penstock.runtime.step.bound_schedules
from penstock import ArgumentError, Microbatches, PartitionError, ShapeError, pipeline, verify
from scaffolding.by_hand import assert_same_gradients, assert_steps_by_hand
from scaffolding.models import GPT, ConvNet, Forward, OneLayer, squared_error, token_error
from scaffolding.small import WIDTH, Retrieval, batch, mlp, retrieval_error

# -- fewer rows than microbatches, other lengths ----------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved-1f1b", "zb-v", "chimera"])
def test_trap_12_a_batch_of_fewer_rows_than_microbatches(schedule: str) -> None:
    chunks = 2 if schedule in ("interleaved-1f1b", "zb-v") else 1
    copies = schedule == "chimera"
    model = mlp(8)
    reference, names = copy.deepcopy(model), [name for name, _ in model.named_parameters()]
    options = {"ranks": 2, "microbatches": 8, "loss": squared_error, "schedule": schedule, "stages_per_rank": chunks}
    with pipeline(model, batch()[:1], **options) as pipe:
        but = names if copies else ()
        assert_steps_by_hand(pipe, reference, map(batch, (11, 2, 5, 3)), squared_error, 8, but=but)
        result = pipe.step(batch(5)[0], target=batch(5)[1])
        assert len(result.losses) == len(result.sizes) == 5
        if copies:
            with pytest.raises(ArgumentError, match="1 row, but the schedule needs at least 2"):
                pipe.step(*batch(1)[:1], target=batch(1)[1])


def test_a_first_batch_of_fewer_rows_than_microbatches() -> None:
    model = mlp(8)
    reference = copy.deepcopy(model)
    for_two = Microbatches([batch(3)[0][:1], batch(3)[0][1:]])
    for example, first in ((batch(3)[0], 3), (for_two, 2)):
        with pipeline(model, (example,), ranks=2, microbatches=4, loss=squared_error) as pipe:
            assert pipe.schedule.microbatches == first
            assert f"a batch of 3 rows like the example makes {first} microbatches, not 4" in pipe.notes
            assert_steps_by_hand(pipe, reference, map(batch, (3, 11, 2)), squared_error, 4)


@pytest.mark.parametrize("first", [8, 3])
def test_a_batch_is_cut_into_fewer_where_a_norm_needs_two_rows(first: int) -> None:
    """The last one of an epoch, or the example itself."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    reference = copy.deepcopy(model)
    with pipeline(model, (torch.randn(first, 4),), ranks=2, microbatches=4, loss=squared_error) as pipe:
        assert pipe.schedule.microbatches == min(4, first // 2)
        assert pipe.predict(torch.randn(3, 4)).shape == (3, 4)
        for rows, microbatches in ((8, 4), (7, 3), (2, 1), (5, 2), (8, 4)):
            x, y = torch.randn(rows, 4), torch.randn(rows, 4)
            assert_steps_by_hand(pipe, reference, [(x, y)], squared_error, microbatches)
        assert pipe.predict(torch.randn(3, 4)).shape == (3, 4)  # is cut otherwise once a norm has needed two rows
        with pytest.raises(PartitionError, match=r"more than one row .* in training, and the batch has one"):
            pipe.step(x[:1], target=y[:1])
    assert penstock.profile(model, (torch.randn(8, 4),), budget_seconds=0).rows == 2
    with pytest.raises(PartitionError, match="batch norm needs more than one row in each microbatch"):
        penstock.profile(model, (torch.randn(8, 4),), microbatch_sizes=[1], budget_seconds=0)


def test_a_batch_of_another_dtype_says_what_the_pipeline_was_made_for() -> None:
    x, y = batch()
    with pipeline(mlp(), (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        with pytest.raises(RuntimeError, match="dtype") as caught:
            pipe.step(x.double(), target=y)
        made_for = "of 2 dimensions in float64; the pipeline was made for input_1 of 2 dimensions in float32"
        assert any(note.endswith(made_for) for note in caught.value.__notes__), caught.value.__notes__


def test_trap_4_batch_norm_counts_each_microbatch_of_each_size_once() -> None:
    torch.manual_seed(0)
    model = ConvNet()
    reference = copy.deepcopy(model)
    with pipeline(model, (torch.randn(9, 3, 6, 6),), ranks=3, microbatches=3, loss=squared_error) as pipe:
        for rows, size in ((9, 6), (4, 8), (2, 6), (9, 6)):
            images, target = torch.randn(rows, 3, size, size), torch.randn(rows, 3)
            pipe.evaluate(images, target=target)
            assert_steps_by_hand(pipe, reference, [(images, target)], squared_error, 3)


def test_masks_of_a_step_do_not_depend_on_what_came_before() -> None:
    """Streams are keyed by step and microbatch: the first recording of a kind draws what a known one does."""
    found = []
    for lengths in ((5, 5, 4), (4, 3, 4)):
        torch.manual_seed(0)
        model = GPT(dropout=0.3)
        with pipeline(
            model, (torch.zeros(4, 5, dtype=torch.int64),), ranks=2, microbatches=2, loss=token_error
        ) as pipe:
            for length in lengths:
                ids = torch.arange(4 * length).view(4, length) % 19
                loss = pipe.step(ids, target=ids).loss
            found.append(loss)
    assert torch.equal(*found)


def test_a_transposed_batch_is_of_another_kind() -> None:
    """Its values travel with its strides, which both ends of a channel have agreed on."""

    class Passes(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x  # x itself crosses the cut

    torch.manual_seed(0)
    model = Passes(*mlp(4))
    reference = copy.deepcopy(model)
    x, y = batch()
    with pipeline(model, (x,), ranks=2, microbatches=3, loss=squared_error) as pipe:
        given = [(x, y), (x.t().contiguous().t(), y), (x, y)]
        assert_steps_by_hand(pipe, reference, given, squared_error, 3)


# -- cut already ------------------------------------------------------------------------------------------------------


def test_microbatches_that_do_not_fit_are_refused() -> None:
    x, y = batch(6)
    two, three = Microbatches([x[:2], x[2:]]), Microbatches(torch.split(x, 2))
    with pytest.raises(ArgumentError, match=r"Microbatches\(\[\]\): expected at least one"):
        Microbatches([])
    with pytest.raises(ArgumentError, match=r"args is a Microbatches.*pass \(x,\)"):
        pipeline(mlp(), two, loss=squared_error)
    with pipeline(mlp(), (two,), microbatches=2, loss=squared_error) as pipe:
        with pytest.raises(ArgumentError, match="3 microbatches were given, but the schedule is for 2; pass at most"):
            pipe.step(three, target=y)
        with pytest.raises(ShapeError, match="target has 3 pieces; expected 2, the number of microbatches"):
            pipe.step(two, target=three)
        with pytest.raises(ShapeError, match=r"target has 5 rows .*expected 6"):
            pipe.step(two, target=y[:5])
        with pytest.raises(ShapeError, match=r"target requires a gradient.*pass target.*\.detach\(\)"):
            pipe.step(two, target=Microbatches([y[:2].clone().requires_grad_(), y[2:]]))
        assert pipe.step(two, target=y).loss > 0
        piece = x[:2].clone().requires_grad_()
        pipe.step(Microbatches([piece, x[2:]]), target=y)
        assert piece.grad is not None


# -- any structure, plain values --------------------------------------------------------------------------------------


@dataclass
class Pair:
    value: Tensor
    scale: Any
    name: str
    missing: Tensor | None = None


_pytree.register_dataclass(Pair)


class Dicts(OneLayer):
    """Hands on a tensor, None, a number and a text, which cross the cuts."""

    def forward(self, values: dict[str, Any]) -> dict[str, Any]:
        value = self.layer(values["value"]) * values["scale"]
        return {**values, "value": value if values["name"] == "plus" else -value}


def of_pairs(self: Any, pair: Pair) -> Pair:
    values = {"value": pair.value, "scale": pair.scale, "name": pair.name, "missing": pair.missing}
    for layer in self.layers:
        values = layer(values)
    return Pair(**values)


def pair_loss(output: Pair, target: Pair) -> Tensor:
    assert output.missing is None
    assert output.name in ("plus", "minus")
    return (output.value - target.value).square().mean() * target.scale


def test_trap_14_dataclasses_and_plain_values_that_change_between_steps() -> None:
    """A number, a text: constants of a recording, so that each new one is a new kind of batch. A tensor is not."""
    torch.manual_seed(0)
    model, (x, y) = Forward(of_pairs, layers=nn.ModuleList(Dicts(WIDTH) for _ in range(3))), batch()
    reference, half, third = copy.deepcopy(model), torch.tensor(0.5), torch.tensor(1 / 3)
    with pipeline(model, (Pair(x, 1.0, "plus"),), ranks=3, microbatches=3, loss=pair_loss) as pipe:
        for scale, name in ((1.0, "plus"), (2.0, "plus"), (2, "minus"), (1.0, "plus"), (half, "plus"), (third, "plus")):
            model.zero_grad()
            reference.zero_grad()
            result = pipe.step(Pair(x, scale, name), target=Pair(y, 3, "target"))
            terms = []
            for mine, wanted in zip(x.split([4, 4, 3]), y.split([4, 4, 3]), strict=True):
                output = reference(Pair(mine.clone(), scale, name))
                loss = pair_loss(output, Pair(wanted.clone(), 3, "target"))
                loss.backward(torch.tensor(len(mine) / 11))
                terms.append(loss.detach() * (len(mine) / 11))
            assert torch.equal(result.loss, terms[0] + terms[1] + terms[2])
            assert_same_gradients(model, reference)
        assert len(list(pipe.session.bound_schedules)) == 4


def test_kinds_are_known_again_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    record = penstock.partition.partitioner.record
    monkeypatch.setattr(
        "penstock.partition.partitioner.record",
        lambda *args, **options: (recorded.append(args), record(*args, **options))[1],
    )
    monkeypatch.setattr("penstock.runtime.step.bound_schedules.CACHED_SCHEDULES", 3)
    with pipeline(mlp(2), batch(1)[:1], microbatches=1, loss=squared_error) as pipe:
        for _ in range(3):
            for rows in (1, 2, 3):
                pipe.step(batch(rows)[0], target=batch(rows)[1])
        assert len(list(pipe.session.bound_schedules)) == 3
        assert len(recorded) == 3 + 2  # with 4 and 5 rows, to find what follows the number
        with pytest.warns(UserWarning, match="input signatures.*Pad batches to a few shapes") as warned:
            pipe.step(batch(4)[0], target=batch(4)[1])
        assert warned[0].filename == __file__
        pipe.step(batch(5)[0], target=batch(5)[1])  # said once
        assert len(list(pipe.session.bound_schedules)) == 3
        oldest = next(iter(pipe.session.bound_schedules))
        for rows in (3, 6):
            pipe.step(batch(rows)[0], target=batch(rows)[1])
        assert any(job is oldest for job in pipe.session.bound_schedules), "it was used after the others"
        assert len(pipe.session.engine.transports[0]._hub.channels) == 0  # type: ignore[attr-defined]


# -- whole outputs ----------------------------------------------------------------------------------------------------


def answers(answer: Callable[[Tensor], Any]) -> nn.Module:
    """Returns `answer(y)` beside its output."""

    def forward(self: Any, x: Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"y": y, "pair": (y[:, 0], "text", None), "other": answer(y)}

    return Forward(forward, layer=nn.Linear(WIDTH, WIDTH))


def test_predict_gives_what_the_unsplit_model_gives() -> None:
    torch.manual_seed(0)
    model, (x, _) = answers(lambda y: 3), batch()
    reference = copy.deepcopy(model)
    with pipeline(model, (x,), microbatches=4, loss=lambda output, _: output["y"].sum()) as pipe:
        for rows in (11, 2):
            found, expected = pipe.predict(x[:rows]), reference(x[:rows])
            torch.testing.assert_close(found["y"], expected["y"])
            torch.testing.assert_close(found["pair"][0], expected["pair"][0])
            assert (found["pair"][1:], found["other"]) == (("text", None), 3)
        assert pipe.predict(x, outputs=False) is None
        assert pipe.predict(x, outputs=0) is not None
        with pytest.raises(ArgumentError, match="outputs=1: expected True, False, 'all' or a rank from 0 to 0"):
            pipe.predict(x, outputs=1)
        with pytest.raises(ArgumentError, match="there is no loss"):
            _ = pipe.evaluate(x).loss


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda y: y.mean(), r"output\['other'\] is one number for each microbatch"),
        (lambda y: y.t(), r"output\['other'\] has shapes \[\[9, 2\], \[9, 1\]\]"),
        (len, r"output\['other'\] is not the same in all microbatches \(2 in the first\)"),
        (
            lambda y: y[:, :, None].expand(-1, 9, len(y)),
            r"\[\[2, 9, 2\], \[1, 9, 1\]\], which do not make one tensor",
        ),
    ],
    ids=["scalar", "no rows", "number", "lengths"],
)
def test_predict_refuses_what_makes_no_whole(answer: Any, words: str) -> None:
    x, _ = batch(3)
    with pipeline(answers(answer), (x,), microbatches=2, loss=lambda output, _: output["y"].sum()) as pipe:
        with pytest.raises(ShapeError, match=words) as caught:
            pipe.predict(x)
        assert "evaluate(..., outputs=True)" in str(caught.value)


# -- a loss that counts items itself ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [torch.tensor, int])
def test_num_items_in_batch_makes_accumulated_microbatches_the_whole_batch(kind: Any) -> None:
    """As the Trainer of transformers passes it: each microbatch's sum over the items of the batch, which add up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=37, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=16,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    reference = copy.deepcopy(model)

    def inputs(rows: int) -> dict[str, Any]:
        ids = torch.randint(4, 37, (rows, 7), generator=torch.Generator().manual_seed(rows))
        labels = ids.clone()
        labels[0, 2:] = labels[-1, 5:] = -100
        return {"input_ids": ids, "labels": labels, "num_items_in_batch": kind(int((labels[:, 1:] != -100).sum()))}

    with pipeline(model, (), inputs(6), ranks=2, microbatches=3, reduction="sum") as pipe:
        for rows in (6, 5, 2, 6):
            given = inputs(rows)
            model.zero_grad()
            reference.zero_grad()
            whole = reference(**given).loss
            whole.backward()
            result = pipe.step(**given)
            torch.testing.assert_close(result.loss, whole.detach())
            torch.testing.assert_close(torch.stack(result.losses).sum(), whole.detach())
            logits = reference(given["input_ids"]).logits[:, :-1]
            rows_apart = F.cross_entropy(logits.mT, given["labels"][:, 1:], reduction="none").sum(1)
            parts = torch.stack([part.sum() for part in rows_apart.split(list(result.sizes))])
            torch.testing.assert_close(torch.stack(result.losses), parts.detach() / given["num_items_in_batch"])
            for (name, a), (_, b) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
                torch.testing.assert_close(a.grad, b.grad, msg=name, rtol=1e-4, atol=1e-7)
    with pytest.raises(ArgumentError, match=r"num_items_in_batch, but .*pass reduction='sum'"):
        pipeline(model, (), inputs(6), ranks=2, microbatches=3)
    without = {**inputs(6), "num_items_in_batch": None}
    with pipeline(model, (), without, ranks=2, microbatches=3, reduction=lambda target: target.numel()) as pipe:
        assert pipe.step(**without).loss.isfinite()
        assert pipe.predict(input_ids=without["input_ids"], outputs=True) is not None  # there is nothing to weigh
        with pytest.raises(ArgumentError, match="reduction is a function of the target, but the step has none"):
            pipe.step(input_ids=without["input_ids"])
    with (
        pipeline(model, (), without, ranks=2, microbatches=3, reduction=lambda target: target.numel()) as pipe,
        pytest.raises(ArgumentError, match=r"num_items_in_batch, but .*pass reduction='sum'"),
    ):
        pipe.step(**inputs(6))


def test_a_batch_that_needs_parameters_which_the_example_did_not_is_warned_of() -> None:
    """An optimizer of `pipe.parameters()` would never train them."""

    class Tasks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk = mlp(8)
            self.heads = nn.ModuleDict({task: nn.Linear(WIDTH, WIDTH) for task in "ab"})

        def forward(self, x: Tensor, task: str = "a") -> Tensor:
            return self.heads[task](self.trunk(x))

    model, (x, y) = Tasks(), batch(4)
    with pipeline(model, (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        pipe.step(x, target=y)  # a warning would be an error, as in all tests
        pipe.evaluate(x, "b", target=y)
        with pytest.warns(
            UserWarning, match=r"uses 'heads\.b\.weight', which it did not for the pipeline's example"
        ) as new:
            pipe.step(x, "b", target=y)
        assert new[0].filename == __file__
        pipe.step(x, "a", target=y)
        pipe.step(x, "b", target=y)


# -- two rows for each row of another ---------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [False, True])
def test_an_input_with_two_rows_for_each_of_another(by_name: bool) -> None:
    """Refused with what to pass, which works in steps, evaluations and predictions, for inputs and targets."""
    queries, (passages, target) = batch(10)[0], batch(20)
    model, bias = Retrieval(), torch.randn(20, WIDTH)
    reference = copy.deepcopy(model)

    def cut(x: Tensor) -> Microbatches:
        return Microbatches(x.split([6, 6, 4, 4]))

    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "loss": retrieval_error}
    words = r"pass the one of 20 rows as penstock.Microbatches\(x.split\(\[6, 6, 4, 4\]\)\)"
    with pytest.raises(ShapeError, match=words):
        pipeline(model, (queries, passages), **options)
    with pytest.raises(ShapeError, match=words):
        pipeline(model, (queries, cut(passages)), {"bias": bias}, **options)
    named: dict[str, Any] = {"bias": cut(bias)} if by_name else {}
    given = (queries, cut(passages))
    assert verify(copy.deepcopy(model), given, named, target=cut(target), **options).ok
    with pipeline(model, given, named, batch_dims={"output": (0, 0)}, **options) as pipe:
        with pytest.raises(ShapeError, match=r"target has 20 rows .*expected 10.*" + words):
            pipe.step(*given, **named, target=target)
        result = pipe.step(*given, **named, target=cut(target))
        assert torch.equal(pipe.evaluate(*given, **named, target=cut(target)).loss, result.loss)
        found, expected = pipe.predict(*given, **named), reference(queries, passages, bias if by_name else None)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)
