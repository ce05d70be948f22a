"""What `verify` compares, with what, and what it says: each kind of mistake is planted and found."""

from __future__ import annotations

import itertools
import random
import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock import ArgumentError, Microbatch, Pipeline, VerificationReport, verify
from penstock.runtime.exact import rules as exact
from penstock.verification.comparison import compare
from penstock.verification.rounding_bounds import RoundingBounds
from scaffolding.proofs import after_each_step, close
from scaffolding.small import WIDTH, batch, mlp

TWO = {"ranks": 2, "microbatches": 4}


def verified(model: Any, x: Any = None, loss: Any = None, target: Any = None, **options: Any) -> VerificationReport:
    args = batch()[:1] if x is None else (x,)
    return verify(model, args, target=target, loss_fn=squares if loss is None else loss, **{**TWO, **options})


def squares(output: Tensor) -> Tensor:
    return output.pow(2).mean()


# -- what proves nothing, or too little -------------------------------------------------------------------------------


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    def spoil(pipe: Pipeline) -> None:
        for _, parameter in pipe.named_parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)

    after_each_step(monkeypatch, spoil)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_loss_that_is_nan_proves_nothing(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    spoil_gradients(monkeypatch, factor)
    report = verified(mlp(), loss=lambda output: squares(output) * float("nan"))
    assert not report.ok
    assert {row.verdict for row in report.rows if row.kind in ("loss", "gradient")} == {"undefined"}
    assert {row.verdict for row in report.rows if row.kind == "output"} == {"equal"}, "which are finite"
    assert "inconclusive: on one device, too, the loss is not finite, 12 of 12 gradients" in report.summary()
    assert report.full_batch is not None
    assert report.full_batch.verdict == "explained"


# -- terms that cancel ------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.outer(torch.tanh(self.inner(x)))


class Triplet(nn.Module):
    """The encoder's last bias takes the same from all three, so that its gradient is 0 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Sequential(*(Residual() for _ in range(4)))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, *given: Tensor) -> list[Tensor]:
        return [self.head(self.encoder(x)) for x in given]


LAST = "encoder.3.outer.bias"


def triplet(output: list[Tensor]) -> Tensor:
    return nn.functional.triplet_margin_loss(*output)


def proof_of_triplet(model: Triplet | Callable[[], Triplet], schedule: str, **options: Any) -> VerificationReport:
    torch.manual_seed(1)
    given = [torch.randn(12, WIDTH) for _ in range(3)]
    return verify(model, given, loss=triplet, ranks=3, microbatches=3, schedule=schedule, **options)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_terms_of_several_stages_may_cancel(schedule: str) -> None:
    report = proof_of_triplet(Triplet, schedule)
    assert report.ok, report.summary()
    rows = {row.name: row for row in report.rows if row.kind == "gradient"}
    bias = rows[LAST]
    assert bias.tolerance_reason == "terms of several stages, added in another order"
    assert bias.max_difference > 1e-6 * bias.max_reference, "or this shows nothing"
    assert bias.max_difference < 1e-6 * bias.max_terms < 1e-6
    assert not rows["encoder.3.outer.weight"].max_terms, "its terms do not cancel"


@pytest.mark.parametrize(("second", "size"), [(-2.0, 4.0), (0.0, 2.0), (1.0, 3.0)])
def test_terms_are_measured_once(second: float, size: float) -> None:
    """Each use of a parameter makes one; that the backward adds them up makes them no larger."""
    weight = nn.Parameter(torch.ones(3))
    bounds = RoundingBounds({"w": weight}, by_use=["w"])
    with bounds.measuring() as terms:
        loss = (weight * 2).sum() + (weight * second).sum()
        bounds.watch(loss)
        loss.backward()
    assert terms["w"].tolist() == [size] * 3


@pytest.mark.parametrize("factor", [0.0, 2.0, 1.001])
def test_terms_that_cancel_are_still_to_be_there_once(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """The last stage's terms of one microbatch are lost, counted twice, or a little off."""
    model, backward, calls = Triplet(), exact.backward, itertools.count(1)

    def wrong(*args: Any) -> None:
        bias = model.encoder[3].outer.bias
        before = torch.zeros_like(bias) if bias.grad is None else bias.grad.clone()
        backward(*args)
        if next(calls) == 1 and bias.grad is not None:
            bias.grad = before + (bias.grad - before) * factor

    monkeypatch.setattr(exact, "backward", wrong)
    report = proof_of_triplet(model, "gpipe")
    assert [row.name for row in report.failures] == [LAST]


# -- two models -------------------------------------------------------------------------------------------------------


class ClosesOverItself(nn.Module):
    """As minGPT's blocks do."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.both = lambda x: self.two(torch.relu(self.one(x)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.both(x)


class Hooked(nn.Module):
    """A hook that reads the module it was made by, not the one that it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.layer.register_forward_hook(lambda module, args, output: output * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Shares(nn.Module):
    """Copies, but for its weight, which all of them share."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def __deepcopy__(self, memo: Any) -> Shares:
        return Shares(self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def twice(kind: Callable[[], nn.Module]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(kind(), kind())


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ClosesOverItself, "shares module '0' with it, through self, a variable around ClosesOverItself.__init__"),
        (Hooked, "shares module '0' with it, through self, a variable around Hooked.__init__"),
        (lambda: Shares(torch.eye(WIDTH)), r"shares the memory of '0\.weight' with it"),
    ],
)
def test_a_copy_that_shares_state_is_refused_and_a_function_makes_two_models(
    kind: Callable[[], nn.Module], words: str
) -> None:
    with pytest.raises(ArgumentError, match=f"the copy of this model {words}.*pass a function that makes the model"):
        verified(twice(kind))
    report = verified(partial(twice, kind))
    assert report.ok, report.summary()


def normed() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))


def test_a_model_that_cannot_be_copied_is_made_twice() -> None:
    used = normed()
    used(torch.ones(2, WIDTH))  # its weight is now the result of a computation
    with pytest.raises(ArgumentError, match=r"cannot be copied \(RuntimeError: .*pass a function that makes the model"):
        verified(used)
    report = verified(normed)
    assert report.ok, report.summary()


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad /= 2


def halved(way: str) -> nn.Module:
    """Hooks change gradients, which copies do not take along."""
    model = mlp()
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    if way == "register_hook":
        weight.register_hook(lambda gradient: gradient / 2)
    else:
        weight.register_post_accumulate_grad_hook(halve)
    return model


@pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_parameters_want_a_function(way: str) -> None:
    with pytest.raises(ArgumentError, match=r"'0.weight' has a hook on its gradient .*pass a function that makes"):
        verified(halved(way))
    report = verified(partial(halved, way), microbatches=1)
    assert report.ok, report.summary()


def test_bound_methods_and_partials_go_with_the_copy() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model[0].again = partial(model[1].forward)  # type: ignore[assignment]
    model[1].scale = model[0].extra_repr  # type: ignore[assignment]
    assert verified(model).ok


def test_a_function_that_keeps_its_model_is_copied() -> None:
    model = mlp()
    assert verified(lambda: model).ok
    kept = twice(ClosesOverItself)
    with pytest.raises(ArgumentError, match="pass a function that makes the model"):
        verified(lambda: kept)


def test_a_function_that_makes_another_model_each_time_is_told_from_a_difference() -> None:
    seeds = itertools.count()
    with pytest.raises(ArgumentError, match=r"another model .* from the same seeds: '0.bias' differs; set all values"):
        verified(lambda: mlp(seed=next(seeds)))
    with pytest.raises(ArgumentError, match="returned an int; expected a module"):
        verified(lambda: 3)


def test_a_function_may_draw_from_any_generator_which_is_left_as_after_one_call() -> None:
    def make() -> nn.Module:
        import numpy

        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        nn.init.constant_(model[0].weight, random.random() * numpy.random.rand())  # type: ignore[arg-type]
        return model

    random.seed(1)
    torch.manual_seed(1)
    assert verified(make).ok
    left = random.random(), torch.rand(())
    random.seed(1)
    torch.manual_seed(1)
    make()
    assert left == (random.random(), torch.rand(()))


@pytest.mark.parametrize("way", ["closure", "pair"])
def test_a_loss_that_reads_the_model_reads_the_right_one(way: str) -> None:
    def make() -> tuple[nn.Module, Callable[[Tensor], Tensor]]:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))
        return model, lambda output: output.pow(2).mean() * len(model) + model[-1].weight.detach().sum()

    if way == "pair":
        assert verified(make).ok
    else:
        model, loss = make()
        with pytest.raises(ArgumentError, match="shares the model with it, through model, a variable around"):
            verified(model, loss=loss)


# -- buffers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.uint8, torch.complex64, torch.float16])
def test_a_spoiled_buffer_of_any_kind_differs(dtype: torch.dtype) -> None:
    other = torch.tensor([0, 1, 1]).to(dtype)
    assert compare("buffer", "b", (0,), other.clone(), other, exact=False, reordered="any").verdict == "equal"
    row = compare("buffer", "b", (0,), torch.tensor([0, 1, 0]).to(dtype), other, exact=False, reordered="any")
    assert (row.verdict, row.max_difference, row.max_reference) == ("different", 1, 1)


class TrainedBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.ones(WIDTH, requires_grad=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def test_gradients_of_buffers_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    make, leaves = partial(twice, TrainedBuffer), ["0", "1"]
    report = verified(make, leaf_modules=leaves)
    assert report.ok, report.summary()
    rows = {(row.kind, row.name) for row in report.rows}
    assert {("gradient", "0.gain"), ("gradient", "1.gain"), ("buffer", "0.gain")} <= rows


# -- the whole batch --------------------------------------------------------------------------------------------------


class Sequence(nn.Module):
    def __init__(self, kind: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.dropout, self.head = nn.Linear(WIDTH, 8), nn.Dropout(dropout), nn.Linear(8, 4)
        self.inner: nn.Module = nn.LSTM(8, 8)
        if kind == "transformer":
            self.inner = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 1, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(self.embed(x))
        return self.head(self.dropout(found[0] if isinstance(found, tuple) else found))


def tokens(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def by_class(output: Tensor, target: Tensor) -> Tensor:
    """Halves' losses make another one, but their outputs are the whole batch's."""
    return F.cross_entropy(output.flatten(0, 1), target.flatten(), output.new_tensor([1.0, 9.0, 1.0, 3.0]))


@pytest.mark.parametrize(
    ("kind", "dropout", "loss"),
    [("lstm", 0.0, tokens), ("lstm", 0.5, tokens), ("transformer", 0.0, tokens), ("lstm", 0.0, by_class)],
)
def test_trap_28_a_batch_in_dimension_1_does_not_pass_in_silence(kind: str, dropout: float, loss: Any) -> None:
    x, y = torch.randn(8, 8, WIDTH), torch.randint(4, (8, 8))  # rows and times cannot be told by their number
    report = verified(lambda: Sequence(kind, dropout), x, loss, y)
    assert not report.ok
    assert not report.failures  # bits are those of the microbatches, which are wrong
    assert "along dimension 1 they do not: the batch is in dimension 1; pass batch_dims=1" in report.summary()
    told = verified(lambda: Sequence(kind, dropout), x, loss, y, batch_dims=1)
    assert told.ok, told.summary()
    assert verified(lambda: Sequence(kind, dropout), x, loss, y, full_batch=False).ok


class Rearranged(nn.Module):
    """Attention over tokens, rearranged inside as in CLIP's blocks, of rows that look at each other."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.inner, self.head, self.length = nn.MultiheadAttention(WIDTH, 1), nn.Linear(WIDTH, 4), length

    def forward(self, x: Tensor) -> Tensor:
        y = x.transpose(0, 1)
        assert len(y) == self.length or not self.length
        y = self.inner(y, y, y, need_weights=False)[0].transpose(0, 1)
        return self.head(y - y.mean(0))


@pytest.mark.parametrize(("length", "asked"), [(0, False), (8, True)])
def test_rows_of_dimension_1_that_depend_on_each_other_are_no_batch(length: int, asked: bool) -> None:
    """Though an attention has batch_first=False. If it takes no shorter sequences, nobody knows."""
    x, y = torch.randn(8, 8, WIDTH), torch.randint(4, (8, 8))
    check = verified(lambda: Rearranged(length), x, tokens, y, leaf_modules=["inner"]).full_batch
    assert check is not None
    assert check.verdict == "warning"
    assert ("Is the batch in dimension 1? Then pass batch_dims=1" in check.why) is asked
    assert ("batch_dims=1" in check.why) is asked


class Mixes(nn.Module):
    """Rows look at each other."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        return self.two(x - x.mean(0))


class Warms(nn.Module):
    """Counts its calls, and does more with each."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls.clone()


class Random(nn.Module):
    """Draws in any mode."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand_like(x)


@pytest.mark.parametrize(
    ("make", "verdict", "words"),
    [
        (mlp, "close", "loss and gradients are those of the whole batch"),
        (lambda: nn.Sequential(*mlp(2), Warms()), "close", "loss and gradients are those of the whole batch"),
        (
            lambda: nn.Sequential(*mlp(2), nn.BatchNorm1d(WIDTH)),
            "explained",
            r"batch norm \('2'\) takes its statistics",
        ),
        (lambda: nn.Sequential(*mlp(2), nn.Dropout(0.5)), "explained", r"random numbers \('2'\) are drawn"),
        (lambda: nn.Sequential(*mlp(2), Random()), "explained", "draws random numbers, which cannot be switched off"),
        (Mixes, "warning", "rows of the batch depend on each other. Is the batch in dimension 1?"),
        (
            lambda: nn.Sequential(*mlp(2), nn.Dropout(0.5), nn.BatchNorm1d(WIDTH), Mixes()),
            "warning",
            "rows of the batch depend on each other",
        ),
    ],
)
def test_why_the_whole_batch_differs(make: Any, verdict: str, words: str) -> None:
    report = verified(make)
    assert not report.failures
    assert report.full_batch is not None
    assert report.full_batch.verdict == verdict, report.full_batch
    assert re.search(words, report.full_batch.text), report.full_batch.text
    assert report.ok
    assert ("; warning: the microbatches' loss is" in report.summary()) == (verdict == "warning")
    assert report.to_dict()["full_batch"]["text"] == report.full_batch.text


class Routed(nn.Module):
    """A mixture of experts, with a loss that balances them: no mean over rows. It computes in `dtype`."""

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.first, self.router, self.dtype = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3, bias=False), dtype
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.router.weight.data.mul_(0.02)  # as before any training

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x)
        chances = self.router(x).softmax(-1, self.dtype)
        best = chances.max(-1)
        mixed = torch.stack([expert(x) for expert in self.experts], 1)[torch.arange(len(x)), best.indices]
        counts = F.one_hot(best.indices, 3).to(chances.dtype).mean(0)
        return mixed.to(chances.dtype) * best.values[:, None], 3 * (counts * chances.mean(0)).sum()


@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_a_router_whose_loss_looks_at_all_rows_trains_otherwise(dtype: torch.dtype | None) -> None:
    """Though that hardly shows in the loss."""
    balanced = lambda output: 5 + squares(output[0]) + 0.01 * output[1]  # noqa: E731
    report = verified(lambda: Routed(dtype), torch.randn(12, WIDTH), balanced)
    assert not report.failures
    assert report.full_batch is not None
    assert report.full_batch.verdict == "warning", report.full_batch
    assert report.full_batch.microbatches == pytest.approx(report.full_batch.whole, rel=2e-5)
    assert "the gradient of 'router.weight' differs most" in report.summary()
    assert "the load-balancing loss of a router" in report.summary()
    close(verified(lambda: Routed(dtype), torch.randn(12, WIDTH), lambda output: squares(output[0])))


def test_a_loss_that_is_no_mean_is_warned_of() -> None:
    target = torch.tensor([0, -100, 1, 2, -100, 3, 1, -100, -100, 2, 1])
    with pytest.warns(UserWarning, match=r"pass reduction=lambda target: \(target != -100\)"):
        report = verified(mlp, loss=F.cross_entropy, target=target)
    assert report.ok
    assert "warning: the microbatches' loss is" in report.summary()
    assert "the outputs agree, so that the loss is not a mean over rows" in report.summary()
    assert "pass reduction=lambda target: (target != -100).sum()" in report.summary()
    told = verified(mlp, loss=F.cross_entropy, target=target, reduction=lambda t: (t != -100).sum())
    assert told.full_batch is not None
    assert told.full_batch.verdict == "close"
    with pytest.warns(UserWarning, match="reduction='sum'"):
        summed = verified(mlp, loss=nn.CrossEntropyLoss(reduction="sum"), target=target)
    assert "pass reduction='sum'" in summed.summary()
    masked = verified(mlp, loss=lambda output, kept: (output * kept).sum() / kept.sum(), target=target[:, None] > 0)
    assert "it weights them" in masked.summary()


def preferences(output: Tensor, target: Tensor) -> Tensor:
    """As DPO, with [chosen; rejected]."""
    chosen, rejected = output.split([6, len(output) - 6] if len(output) == 11 else [len(output) - 1, 1])
    return -F.logsigmoid(chosen.mean() - rejected.mean())


def contrasts(output: Tensor, target: Tensor) -> Tensor:
    one = F.normalize(output, dim=1)
    return F.cross_entropy(one @ one.roll(1, 1).T, torch.arange(len(one)))


@pytest.mark.parametrize("loss", [preferences, contrasts])
def test_a_loss_that_compares_samples_is_told_from_one_that_weights_them(loss: Any) -> None:
    told = verified(mlp, loss=loss).summary()
    assert "in the loss samples depend on each other" in told
    assert all(remedy in told for remedy in ("next to each other", "two inputs", "split_fn="))


class Clip(nn.Module):
    """Computes its own loss, as `CLIPModel(return_loss=True)` does; returns what `shows` names with it."""

    def __init__(self, *shows: str) -> None:
        super().__init__()
        self.one, self.two, self.shows = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), shows

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one, two = F.normalize(self.one(x), dim=1), F.normalize(self.two(x.tanh()), dim=1)
        logits = 5 * one @ two.T
        every = {"loss": F.cross_entropy(logits, torch.arange(len(x))), "one": one, "logits": logits}
        return {name: every[name] for name in ("loss", *self.shows)}


@pytest.mark.parametrize("shows", [(), ("one", "logits")])
def test_a_model_whose_own_loss_compares_samples_is_not_told_to_weight_them(shows: tuple[str, ...]) -> None:
    torch.manual_seed(0)  # in some draws weights of the two losses might explain the whole: both readings are named
    report = verify(Clip(*shows), batch()[:1], **TWO)
    assert report.ok
    assert "depend on each other" in report.summary()
    assert "next to each other" in report.summary()
    assert "reduction=" not in report.summary()


def test_a_models_own_sum_is_told_from_what_compares_samples() -> None:
    class Sums(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).square().sum()

    class Draws(Sums):  # in evaluation, too, as the VAE of pytorch/examples does
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 0.01 * torch.randn_like(x))

    for kind in (Sums, Draws):
        assert (
            "the loss is a sum over rows; pass reduction='sum'" in verify(kind(*mlp(2)), batch()[:1], **TWO).summary()
        )


@pytest.mark.parametrize("padded", [slice(0, 3), slice(9, 11)])
def test_a_microbatch_that_is_all_padding_is_no_reason_to_warn(padded: slice) -> None:
    target = torch.arange(11) % WIDTH
    target[padded] = -100
    close(verified(mlp, loss=F.cross_entropy, target=target, reduction=lambda t: (t != -100).sum(), microbatches=4))


def test_a_model_that_takes_no_more_than_a_microbatch() -> None:
    class Small(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 3:
                raise ValueError("too many rows")
            return super().forward(x)

    report = verified(lambda: Small(*mlp(2)))
    assert report.ok
    assert report.full_batch is not None
    missing = (
        "the comparison with the whole batch is missing: the model raised on the whole batch (ValueError: too many"
    )
    assert report.full_batch.text.startswith(missing)
    assert missing in report.summary()


def test_a_model_that_takes_only_what_a_function_makes_of_the_batch() -> None:
    class Stacks(nn.Sequential):
        def forward(self, *rows: Tensor) -> Tensor:
            return super().forward(torch.stack(rows))

    def split(args: Any, kwargs: Any, target: Any, microbatches: int) -> list[Microbatch]:
        return [Microbatch(tuple(half), rows=4) for half in (args[0][:4], args[0][4:])]

    model, rows = Stacks(*mlp(2)), list(torch.randn(8, WIDTH))
    report = verify(model, (rows,), target=None, loss_fn=squares, split_fn=split, ranks=2, microbatches=2)
    assert report.ok, report.summary()
    assert report.full_batch is not None
    assert "split_fn=" in report.full_batch.text


@pytest.mark.parametrize(
    "loss",
    [
        lambda output: output.float().pow(2).mean(),
        lambda output: (output * 1e4).mean() - (output * 1e4).mean() + output.mean(),
    ],
    ids=["float32", "large sums of a small loss"],
)
def test_rounding_of_the_loss_is_told_from_a_difference_in_double_precision(loss: Any) -> None:
    report = verified(mlp, loss=loss)
    assert report.full_batch is not None
    assert report.full_batch.verdict == "close", report.full_batch


class Averaged(nn.Module):
    """A loss that depends on the average of those before."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(()))

    def forward(self, output: Tensor) -> Tensor:
        loss = output.square().mean()
        self.mean.lerp_(loss.detach(), 0.5)
        return loss / (1 + self.mean.clone())


AVERAGED = Averaged()


def counted() -> Callable[[Tensor], Tensor]:
    calls = 0

    def loss(output: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output.square().mean() * calls

    return loss


def of_the_file() -> Callable[[Tensor], Tensor]:
    return lambda output: AVERAGED(output) + 0


@pytest.mark.parametrize("model", [mlp, mlp()], ids=["made", "copied"])
@pytest.mark.parametrize("make", [counted, of_the_file, Averaged])
def test_a_loss_that_keeps_state_starts_as_the_reference_did(model: Any, make: Any) -> None:
    """A function is one for both: its copy is the function itself."""
    report = verified(model, loss=make())
    assert report.ok, report.summary()


class Opaque:
    """A loss that cannot be copied, with state that nobody can see."""

    def __init__(self) -> None:
        self.factors = (2.0**call for call in itertools.count())

    def __call__(self, output: Tensor, target: Tensor) -> Tensor:
        return F.mse_loss(output, target) * next(self.factors)


OPAQUE = Opaque()


@pytest.mark.parametrize("given", [mlp, mlp(), lambda: (mlp(), OPAQUE)], ids=["made", "copied", "kept"])
def test_a_loss_that_cannot_be_copied_is_refused_unless_it_is_made_twice(given: Any) -> None:
    x, y = batch()
    with pytest.raises(ArgumentError, match=r"this loss cannot be copied \(TypeError: cannot pickle.*MyLoss"):
        verify(given, (x,), target=y, loss_fn=OPAQUE, **TWO)
    verify(lambda: (mlp(), Opaque()), (x,), target=y, full_batch=False, **TWO).raise_if_failed()
