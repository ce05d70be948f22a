"""Torch's own losses reduce a batch in ways that a pipeline can recognize: it names the `reduction=` that fits, and
weights microbatches by it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock._base.errors import ArgumentError
from penstock.runtime.loss.loss import model_loss
from scaffolding.small import WIDTH, batch, mlp

WEIGHT = torch.linspace(1, 3, WIDTH)
CLASSES = torch.arange(11) % WIDTH
PADDED = torch.where(torch.arange(11) < 4, -100, CLASSES)
"""The first of three microbatches has padding alone."""


def step(loss: Any, target: Tensor, **options: Any) -> tuple[penstock.StepResult, list[str], tuple[str, ...]]:
    """The result of a step, what was warned of, and the pipeline's notes."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with penstock.pipeline(mlp(), batch()[:1], ranks=2, microbatches=3, loss_fn=loss, **options) as pipe:
            result = pipe.step(batch()[0], target=target)
            pipe.step(batch()[0], target=target)
            assert all(each.filename == __file__ for each in caught)
            return result, [str(each.message) for each in caught], pipe.notes


@pytest.mark.parametrize(
    ("loss", "reduction", "words"),
    [
        (nn.MSELoss(reduction="sum"), "mean", "pass reduction='sum' to penstock.pipeline"),
        (F.smooth_l1_loss, "sum", "omit reduction="),
        (nn.KLDivLoss(reduction="batchmean"), "sum", "omit reduction="),
        (nn.MSELoss(reduction="sum"), "sum", None),
        (lambda output, target: (output - target).square().sum(), "mean", None),
    ],
)
def test_a_sum_and_a_mean_are_told_apart_when_the_pipeline_is_built(
    loss: Any, reduction: Any, words: str | None
) -> None:
    _, caught, notes = step(loss, torch.rand(11, WIDTH), reduction=reduction)
    assert len(caught) == (words is not None)
    if words is not None:
        assert words in caught[0]
        assert caught[0] in notes


@pytest.mark.parametrize(
    ("loss", "divisor", "warns"),
    [(F.binary_cross_entropy_with_logits, None, True), (F.mse_loss, None, True), (F.mse_loss, 4 * WIDTH, False)],
)
def test_a_sum_within_a_function_is_seen_in_the_first_step(
    loss: Callable[..., Tensor], divisor: int | None, warns: bool
) -> None:
    """As in the VAE of pytorch/examples; one that is divided may be a mean."""

    def function(output: Tensor, target: Tensor) -> Tensor:
        total = loss(output, target, reduction="sum")
        return (total / divisor if divisor else total) - 0.5 * output.square().mean()

    target = torch.rand(11, WIDTH)
    _, caught, _ = step(function, target)
    assert [text for text in caught if "pass reduction='sum' to penstock.pipeline" in text] == caught
    assert len(caught) == warns
    assert step(function, target, reduction="sum")[1] == []


def wrapped(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)


@pytest.mark.parametrize(
    ("loss", "target"),
    [
        (nn.CrossEntropyLoss(WEIGHT), CLASSES),
        (partial(F.cross_entropy, weight=WEIGHT), CLASSES),
        (partial(F.nll_loss, ignore_index=1), CLASSES),
        (nn.CrossEntropyLoss(), PADDED),
        (wrapped, PADDED),
        (lambda output, target: F.cross_entropy(output, target, ignore_index=-1), PADDED.clamp(min=-1)),  # nanoGPT's
    ],
)
def test_the_reduction_that_is_named_gives_the_loss_of_the_whole_batch(
    loss: Callable[[Any, Any], Tensor], target: Tensor
) -> None:
    whole = loss(mlp()(batch()[0]), target).detach()
    result, caught, _ = step(loss, target)
    assert not torch.allclose(result.loss, whole)
    named = eval(caught[0].split("pass reduction=")[1].split(" to penstock.pipeline")[0], {"weight": WEIGHT})
    assert len(caught) == 1
    result, caught, _ = step(loss, target, reduction=named)
    torch.testing.assert_close(result.loss, whole)
    assert not caught


@pytest.mark.parametrize("target", [CLASSES, torch.where(torch.arange(11) % 4 == 3, 0, CLASSES)])
def test_padding_is_no_matter_where_there_is_none(target: Tensor) -> None:
    assert not step(nn.CrossEntropyLoss(), target)[1]


def test_a_models_own_loss_with_padding_in_its_labels() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            output = super().forward(x)
            return {"loss": F.cross_entropy(output, labels), "logits": output}

    inputs = {"x": batch()[0], "labels": PADDED}
    with penstock.pipeline(Own(*mlp()), (), inputs, ranks=2, microbatches=3) as pipe:
        with pytest.warns(UserWarning, match=r"have \[0, 4, 3\] others: .* if the model shifts its labels"):
            result = pipe.step(**inputs)
        assert result.loss.isnan()
        pipe.step(**inputs)  # said once


def test_labels_of_two_kinds_have_no_weights() -> None:
    """As those of BertForPreTraining: the loss has a mean over tokens, and one over rows. Nor is it advised again what
    was followed."""

    class Own(nn.Sequential):
        def forward(self, x: Tensor, labels: Tensor, next_sentence_label: Tensor | None = None) -> dict[str, Tensor]:
            output = super().forward(x)
            loss = F.cross_entropy(output, labels)
            if next_sentence_label is not None:
                loss = loss + F.cross_entropy(output[:, :2], next_sentence_label)
            return {"loss": loss, "logits": output}

    labels = torch.where(torch.arange(11) % 5 < 2, -100, CLASSES)
    inputs = {"x": batch()[0], "labels": labels, "next_sentence_label": torch.arange(11) % 2}
    with (
        penstock.pipeline(Own(*mlp()), (), inputs, ranks=2, microbatches=3) as pipe,
        pytest.warns(UserWarning, match="no weights make it so .* over next_sentence_label, too: pass a loss_fn="),
    ):
        pipe.step(**inputs)
    options: dict[str, Any] = {"ranks": 2, "microbatches": 3, "reduction": lambda target: (target != -100).sum()}
    report = penstock.verify(Own(*mlp()), (), inputs, **options)
    assert "the outputs agree, so that the loss is not a mean over rows" in str(report)
    assert "targets of -100" not in str(report)


def test_maps_of_labels_name_the_class_that_is_ignored() -> None:
    """As Segformer and BEiT do: 255, which is a class like others where each row has one label."""

    class Own(nn.Sequential):
        config = SimpleNamespace(semantic_loss_ignore_index=255)

        def forward(self, x: Tensor, labels: Tensor) -> Tensor:
            output = super().forward(x)[..., None, None].expand(-1, -1, 2, 2)
            return F.cross_entropy(output, labels, ignore_index=255)

    labels = torch.where(PADDED < 0, 255, PADDED)[:, None, None].expand(-1, 2, 2).clone()
    labels[0, 0, 0] = 1
    inputs = {"x": batch()[0], "labels": labels}
    whole = Own(*mlp())(**inputs).detach()
    with (
        penstock.pipeline(Own(*mlp()), (), inputs, ranks=2, microbatches=3) as pipe,
        pytest.warns(UserWarning, match=r"pass reduction=lambda target: \(target != 255\).sum\(\) to"),
    ):
        pipe.step(**inputs)
    options: dict[str, Any] = {"ranks": 2, "microbatches": 3, "reduction": lambda target: (target != 255).sum()}
    with penstock.pipeline(Own(*mlp()), (), inputs, **options) as pipe:
        torch.testing.assert_close(pipe.step(**inputs).loss, whole)


# -- what has no mean, and what is no loss -----------------------------------------------------------------------------


@pytest.mark.parametrize("values", [[0.0, 0.0], [1.0, -1.0], [float("nan"), 1.0]])
def test_weights_that_are_none(values: list[float]) -> None:
    x, y = batch(2)
    weights = iter(values)
    with (
        penstock.pipeline(mlp(), (x,), microbatches=2, loss=F.mse_loss, reduction=lambda _: next(weights)) as pipe,
        pytest.raises(ArgumentError, match=r"reduction: the weights .*expected non-negative"),
    ):
        pipe.step(x, target=y)


@pytest.mark.parametrize(
    "output", [torch.zeros(2), torch.tensor(3), {"logits": torch.tensor(1.5)}, (torch.tensor(1.5),)]
)
def test_what_is_not_a_models_own_loss(output: Any) -> None:
    """More than a number, a count, another entry, and a scalar that requires no gradient."""
    assert model_loss(output) is None
