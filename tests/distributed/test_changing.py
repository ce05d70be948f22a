"""Real ranks with batches that change from step to step: other sizes, other lengths, fewer rows than microbatches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.partition import partitioner
from penstock.runtime.step import bound_schedules
from scaffolding.by_hand import sizes_by_hand, step_by_hand
from scaffolding.models import Block, squared_error, token_error
from scaffolding.ranks import Ranks, RanksError
from scaffolding.representatives import long_after

pytestmark = pytest.mark.distributed


MICROBATCHES = 4

BATCHES = ((11, 6), (5, 6), (3, 6), (2, 9), (11, 6), (5, 6), (5, 6), (1, 3))
"""Rows and length of each step's batch. Fewer rows than microbatches, fewer microbatches than stages; and kinds that
come a second time (which over shared memory is another way) and a third."""


LENGTHS = tuple((8, length) for length in (6, 7, 8, 9, 12, 6, 16, 14, 9))


class Words(nn.Module):
    """Blocks between an embedding and a head, nothing tied, so that all is equal to the bit."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(19, 8), nn.Linear(8, 19)
        self.h = nn.ModuleList(Block(8, 2, 0.0) for _ in range(layers))

    def forward(self, ids: Tensor) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.embed(ids)
        for block in self.h:
            x = block(x, positions[:, None] >= positions[None, :])
        return self.head(x)


def words(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Ids, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(100 * rows + length)
    ids = torch.randint(0, 19, (rows, length + 1), generator=generator)
    target = ids[:, 1:].clone()
    target[::2, 1:] = -100
    return ids[:, :-1].clone(), target


def count(target: Tensor) -> Tensor:
    return (target != -100).sum()


def weights_by_hand(target: Tensor, microbatches: int) -> list[float]:
    counts = [float(count(part)) for part in torch.split(target, sizes_by_hand(len(target), microbatches))]
    return [one / sum(counts) for one in counts]


def lengths(rank: int, options: dict[str, Any]) -> tuple[list[str], int]:
    """What differs, in words, in batches that differ in length alone, and how often the model was recorded."""
    with mock.patch.object(partitioner, "record", wraps=partitioner.record) as recorded:
        return train(rank, 4, options, LENGTHS), recorded.call_count


def train(rank: int, layers: int, options: dict[str, Any], batches: Sequence[tuple[int, int]] = BATCHES) -> list[str]:
    """What differs, in words."""
    torch.manual_seed(0)
    model, wrong = Words(layers), []
    reference = copy.deepcopy(model)
    ids, _ = words(*batches[0])
    with penstock.pipeline(
        model, (ids,), loss=token_error, reduction=count, microbatches=MICROBATCHES, **options
    ) as pipe:
        for number, (rows, length) in enumerate(batches):
            ids, target = words(rows, length)
            microbatches = min(MICROBATCHES, rows)
            reference.zero_grad()
            for parameter in pipe.parameters():
                parameter.grad = None
            expected = step_by_hand(
                reference, (ids,), target, token_error, microbatches, weights_by_hand(target, microbatches)
            )
            mine = (ids,) if pipe.needs_inputs else ()
            wanted = target if pipe.needs_targets else None
            result = pipe.step(*mine, target=wanted, outputs="all")
            grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
            wrong += [f"{number}: {n}" for n, p in pipe.named_parameters() if not torch.equal(p.grad, grads[n])]
            evaluated = pipe.evaluate(*mine, target=wanted)
            for what, loss in (("loss", result.loss), ("evaluated", evaluated.loss)):
                wrong += [] if torch.equal(loss, expected.total) else [f"{number}: {what}"]
            if not all(map(torch.equal, result.outputs, expected.outputs)) or len(result.outputs) != microbatches:
                wrong.append(f"{number}: outputs")
            if pipe.has_outputs and not all(map(torch.equal, result.losses, expected.losses)):
                wrong.append(f"{number}: losses")
    return wrong


def buckets(rank: int) -> list[str]:
    """Microbatches that are cut already, each of a length of its own."""
    torch.manual_seed(0)
    model, wrong = Words(4), []
    reference = copy.deepcopy(model)
    pieces = [words(rows, length) for rows, length in ((3, 5), (1, 9), (2, 2))]
    given = [penstock.Microbatches(one) for one in zip(*pieces, strict=True)]
    with penstock.pipeline(
        model, given[:1], loss=token_error, reduction="sum", microbatches=3, transport="distributed"
    ) as pipe:
        for turn in (slice(None), slice(1, None), slice(None), slice(None, None, -1)):
            reference.zero_grad()
            for parameter in pipe.parameters():
                parameter.grad = None
            losses = [step_by_hand(reference, (x,), y, token_error, 1).total for x, y in pieces[turn]]
            ids, target = (penstock.Microbatches(one) for one in zip(*pieces[turn], strict=True))
            result = pipe.step(ids, target=target)
            grads = {name: parameter.grad for name, parameter in reference.named_parameters()}
            wrong += [n for n, p in pipe.named_parameters() if not torch.equal(p.grad, grads[n])]
            if pipe.has_outputs and not all(map(torch.equal, result.losses, losses)):
                wrong.append("losses")
    return wrong


def predict(rank: int, who: list[Any], schedule: str) -> list[Tensor | None]:
    """The whole output, where it was asked for, each time."""
    torch.manual_seed(0)
    options = {"loss": token_error, "microbatches": MICROBATCHES, "schedule": schedule}
    with penstock.pipeline(Words(2), (words(4, 5)[0],), **options) as pipe:
        pipe.predict(words(4, 5)[0], outputs="all")
        return [pipe.predict(words(7, 5)[0], outputs=where) for where in who]


class Odd(nn.Module):
    """Returns a slice of memory that is mostly gaps, a dtype that cannot be pickled, and what holds no tensor."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        h = self.last(torch.tanh(self.first(x)))
        return {"sliced": h[:, :1], "small": h.detach().to(torch.float8_e4m3fn), "plain": 3, "loss": h.square().mean()}


def odd_outputs(rank: int) -> list[str]:
    """Which outputs differ from the model's own, on any rank."""
    model, x = Odd(), torch.randn(6, 5, generator=torch.Generator().manual_seed(1))
    dims = {"output": {"sliced": 0, "small": 0, "plain": None, "loss": "mean"}}
    wrong = []
    with penstock.pipeline(model, (x,), microbatches=3, cuts=["last"], batch_dims=dims) as pipe:
        for mine, piece in zip(pipe.step(x, outputs="all").outputs, x.split(2), strict=True):
            own = Odd()(piece.clone())
            for name in ("sliced", "small"):
                one, other = ((t.dtype, t.stride(), t.detach().float().tolist()) for t in (mine[name], own[name]))
                wrong += [] if one == other and mine["plain"] == 3 else [name]
    return wrong


def disagree(rank: int, what: str) -> None:
    """The last rank does something else than the others in the second step."""
    torch.manual_seed(0)
    x, y = torch.randn(6, 5), torch.randn(6, 5)
    model = nn.Sequential(*(nn.Linear(5, 5) for _ in range(4)))
    with penstock.pipeline(model, (x,), loss=squared_error, microbatches=3) as pipe:
        pipe.step(x, target=y)
        if pipe.has_outputs and what == "evaluate":
            pipe.evaluate(x, target=y)
        elif pipe.has_outputs and what == "outputs":
            pipe.step(x, target=y, outputs="all")
        elif pipe.has_outputs and what == "mode":
            pipe.eval().step(x, target=y)
        elif pipe.has_outputs and what == "target":
            pipe.step(x, target=y[:5])
        else:
            pipe.step(x, target=y)


def many_kinds(rank: int, most: int, kinds: int) -> tuple[int, int]:
    """More kinds of batches than are kept, each twice: how many are kept, and how many lanes are open."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    few = mock.patch.object(bound_schedules, "CACHED_SCHEDULES", most)
    with few, penstock.pipeline(model, (torch.zeros(1, 5),), loss=squared_error, microbatches=1) as pipe:
        for rows in range(1, kinds + 1):
            for _ in range(2):
                pipe.step(torch.ones(rows, 5), target=torch.zeros(rows, 5))
        channels = [c for some in pipe.session.engine.transports[rank]._channels.values() for c in some]  # type: ignore[attr-defined]
        return len(list(pipe.session.bound_schedules)), sum(channel._ring is not None for channel in channels)


class Skipping(nn.Sequential):
    """Every layer uses the input."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = x
        for layer in self:
            hidden = layer(hidden).relu() + x
        return hidden


def input_gradients(rank: int, schedule: str) -> tuple[bool, Tensor | None, Tensor, bool]:
    """Whether this rank has the inputs, their gradient after two steps and by hand, and whether verify passes."""
    torch.manual_seed(0)
    model = Skipping(*(nn.Linear(5, 5) for _ in range(4)))
    reference, options = copy.deepcopy(model), {"microbatches": MICROBATCHES, "schedule": schedule}
    x, y = torch.randn(7, 5, requires_grad=True), torch.randn(7, 5)
    other, sizes = x.detach().requires_grad_(), sizes_by_hand(7, MICROBATCHES)
    with penstock.pipeline(model, (x.detach(),), loss_fn=squared_error, **options) as pipe:
        for _ in range(2):
            pipe.step(x, target=y)
            for part, target in zip(other.split(sizes), y.split(sizes), strict=True):
                squared_error(reference(part.clone()), target).backward(torch.tensor(len(part) / 7))
        has = pipe.needs_inputs
    assert other.grad is not None
    report = penstock.verify(reference, (x,), target=y, loss_fn=squared_error, **options)
    return has, x.grad, other.grad, report.ok and any(row.name == "input args[0]" for row in report.rows)


@pytest.mark.parametrize(
    ("schedule", "p", "transport"), long_after(1, ("zb-h1", 2, "distributed"), ("interleaved-1f1b", 4, "auto"))
)
def test_traps_5_7_12_21_batches_that_change_have_the_bits_of_one_device(
    schedule: str, p: int, transport: str, request: pytest.FixtureRequest
) -> None:
    ranks: Ranks = request.getfixturevalue(f"ranks{p}")
    chunks = 2 if schedule == "interleaved-1f1b" else 1
    options = {"schedule": schedule, "transport": transport, "stages_per_rank": chunks}
    assert ranks.run(train, max(4, p * chunks), options) == [[]] * p


def test_microbatches_of_lengths_of_their_own(ranks3: Ranks) -> None:
    assert ranks3.run(buckets) == [[]] * 3


@pytest.mark.parametrize(("schedule", "places"), [("zb-h1", [0]), ("chimera", [0, 1])])
def test_inputs_get_their_gradients_where_they_live(ranks2: Ranks, schedule: str, places: list[int]) -> None:
    found = ranks2.run(input_gradients, schedule)
    assert [rank for rank, (has, *_) in enumerate(found) if has] == places
    for has, gradient, by_hand, verified in found:
        assert verified
        assert torch.equal(gradient, by_hand) if has else gradient is None


@pytest.mark.parametrize(
    ("p", "schedule", "here"),
    [(3, "1f1b", {True: [2], "all": [0, 1, 2], 0: [0]}), (2, "chimera", {"all": [0, 1], 0: [0]})],
)
def test_trap_7_the_whole_output_is_in_order_of_microbatch_where_it_was_asked_for(
    p: int, schedule: str, here: dict[Any, list[int]], request: pytest.FixtureRequest
) -> None:
    """Of two copies, the first rank has the outputs of the last microbatches."""
    found = request.getfixturevalue(f"ranks{p}").run(predict, [*here], schedule)
    torch.manual_seed(0)
    model = Words(2)
    expected = torch.cat([model(part.clone()) for part in torch.split(words(7, 5)[0], [2, 2, 2, 1])])
    for which, ranks in enumerate(here.values()):
        assert [rank for rank, outputs in enumerate(found) if outputs[which] is not None] == ranks
        assert all(torch.equal(found[rank][which], expected) for rank in ranks)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("evaluate", r"rank 0 runs a training step, this rank \(1\) an evaluation; every rank must make the same"),
        ("outputs", r"rank 0 runs with outputs=True or False, this rank \(1\) with outputs='all'"),
        ("mode", r"this rank \(1\) with different modes, requires_grad flags or autocast"),
        ("target", r"target has 5 rows \(shape \[5, 5\]\); expected 6, as the inputs have"),
    ],
)
def test_trap_23_ranks_that_do_not_make_the_same_call_are_told(ranks2: Ranks, what: str, said: str) -> None:
    with pytest.raises(RanksError, match=said):
        ranks2.run(disagree, what)


def test_kinds_that_are_forgotten_leave_nothing_behind(ranks2: Ranks) -> None:
    kept = 6  # rather than CACHED_SCHEDULES
    for jobs_kept, lanes in ranks2.run(many_kinds, kept, kept + 5):
        assert jobs_kept == kept
        assert lanes == 2 * kept  # one there and one back


def test_lengths_between_those_recorded_have_the_bits_of_one_device(ranks2: Ranks) -> None:
    options = {"schedule": "1f1b", "transport": "distributed", "balance": "parameters"}
    found = ranks2.run(lengths, options)
    assert found == [([], 11)] * 2  # first for the weights, then 6, 7, 8, 13 and 16 in training and in evaluation


def test_outputs_of_any_dtype_and_layout_reach_all_ranks(ranks2: Ranks) -> None:
    assert ranks2.run(odd_outputs) == [[], []]
