"""Loss functions of output and target, or of the output alone; torch's own: whether they draw, and how they reduce."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, update_wrapper
from typing import Any, NamedTuple, cast

import torch.nn.functional as F
from torch import Tensor, nn

from penstock._base.compat import sums_elements
from penstock._base.errors import ArgumentError, PenstockError
from penstock._base.formatting import named, one_line

Loss = Callable[[Any, Any], Tensor]
"""`loss(output, target)`, a scalar."""


class OutputLoss:
    """A loss of the model's output alone, which needs no target."""

    def __init__(self, function: Callable[[Any], Tensor]) -> None:
        update_wrapper(self, function, updated=())
        self._function = function

    def __call__(self, output: Any, target: Any) -> Tensor:
        return self._function(output)


def uses_target(loss: Loss | None) -> bool:
    """Whether it is a loss of output and target, rather than of the output alone or the model's own."""
    return loss is not None and not isinstance(loss, OutputLoss)


def checked_loss(loss: Loss | Callable[[Any], Tensor] | None) -> Loss | None:
    """Return the user's loss as a function of output and target.

    Raises:
        ArgumentError: it cannot be called with either one or two arguments.
    """
    if loss is None or isinstance(loss, OutputLoss):
        return loss
    if not callable(loss):
        raise ArgumentError(f"loss_fn={loss!r}: expected a function of the model's output and the target, or None")
    if isinstance(loss, type):
        raise ArgumentError(f"loss_fn={loss.__name__}: this is a class; pass an instance, {loss.__name__}(...)")
    function: Any = loss
    try:
        signature = inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        signature = _BOTH  # functions written in C have no signature
    if _accepts(signature, 2):
        if _torch_options(function).get("reduction") == "none":
            raise ArgumentError(
                f"loss_fn={named(_plain_function(function)[0]).__qualname__} with reduction='none' returns a loss for "
                "each sample; expected a scalar: use reduction='mean' or 'sum'"
            )
        return cast(Loss, function)
    if _accepts(signature, 1):
        return OutputLoss(function)
    raise ArgumentError(
        f"loss_fn takes {signature}; expected loss_fn(output, target), or loss_fn(output) where no target is needed"
    )


def explain_missing_target(loss: Loss | None) -> Loss | None:
    """Wrap the loss with a clear message if it raises because a step has no target."""
    if loss is None or not uses_target(loss):
        return loss

    def call(output: Any, target: Any) -> Tensor:
        try:
            return loss(output, target)
        except Exception as error:
            if target is not None or isinstance(error, PenstockError):
                raise
            raise ArgumentError(
                f"target=None, but this rank runs the last stage, and loss_fn(output, None) raised {one_line(error)}; "
                "pass target=... where pipe.needs_targets is true"
            ) from error

    update_wrapper(call, loss, updated=())  # for code that inspects what the loss reads
    return call


_BOTH = inspect.signature(lambda output, target: None)


def _accepts(signature: inspect.Signature, arguments: int) -> bool:
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


_IGNORED = -100
"""The class that torch's losses ignore by default, and models of `transformers` always."""


class _Reduction(NamedTuple):
    """How one of torch's losses reduces a batch; `weight` and `ignored` are those of losses of classes."""

    reduction: str
    weight: Tensor | None = None
    ignored: int | None = None


SUM_ADVICE = (
    "loss_fn sums over its microbatch (reduction='sum'), but the pipeline takes the mean of these, so that the loss "
    "and all gradients are those of the whole batch divided by the number of microbatches; pass reduction='sum' to "
    "penstock.pipeline, too"
)


def adds_up(loss: Tensor) -> bool:
    """Whether a loss, or a term of it, is one of torch's with reduction="sum" that nothing divides, as in the VAE of
    pytorch/examples."""
    nodes = [loss.grad_fn]
    for node in nodes:
        if type(node).__name__ in ("AddBackward0", "SubBackward0"):
            nodes += [operand for operand, _ in node.next_functions]  # type: ignore[union-attr]
    return any(map(sums_elements, nodes))


def reduction_advice(loss: Callable[..., Any] | None, reduction: object) -> str | None:
    """Return what to pass as `reduction` if the given one is not that of torch's loss; None if it is, or for other
    losses."""
    rule = None if callable(reduction) else _find_reduction(loss)
    if rule is None:
        return None
    if reduction == "mean" and rule.reduction == "sum":
        return SUM_ADVICE
    if reduction == "sum" and rule.reduction != "sum":
        return (
            "reduction='sum', but loss_fn takes the mean over its microbatch, so that the loss and all gradients grow "
            "with the number of microbatches; omit reduction=, or pass reduction='sum' to loss_fn, too"
        )
    if reduction == "mean" and (rule.weight is not None or rule.ignored not in (None, _IGNORED)):
        return f"loss_fn weights targets: unless these are probabilities, the mean is not the batch's; {_remedy(rule)}"
    return None


def padding_advice(
    loss: Callable[..., Any] | None,
    targets: Sequence[Any],
    sizes: Sequence[int],
    model: nn.Module,
    kwargs: Mapping[str, Any],
) -> str | None:
    """Return what to pass as `reduction` if microbatches differ in how many targets are not ignored, as padding is; or
    None.

    A mean over no target is NaN. Any integer target of -100 counts as ignored: for a model's own loss and for functions
    that call torch's, as most do; or of -1 among classes, as in nanoGPT. For maps of labels, models name another class
    (Segformer and BEiT of transformers).
    """
    if not all(isinstance(target, Tensor) and not target.is_floating_point() for target in targets):
        return None
    are_maps = loss is None and all(isinstance(target, Tensor) and target.dim() > 2 for target in targets)
    ignored = getattr(getattr(model, "config", None), "semantic_loss_ignore_index", _IGNORED) if are_maps else _IGNORED
    extremes = [int(value) for target in targets if target.numel() for value in (target.min(), target.max())]
    if loss is not None and min(extremes, default=0) == -1 and max(extremes) > 1:  # -1 and 1 may be signs
        ignored = -1
    rule = _find_reduction(loss) or _Reduction("mean", None, ignored)
    if rule.ignored is None or rule.reduction != "mean":
        return None
    counts = [int((target != rule.ignored).sum()) for target in targets]
    if counts == [target.numel() for target in targets] or all(
        count * sizes[0] == counts[0] * size for count, size in zip(counts, sizes, strict=True)
    ):
        return None
    remedy = _remedy(rule)
    others = [name for name, value in kwargs.items() if "_label" in name and isinstance(value, Tensor)]
    if loss is None and others:  # BertForPreTraining's next_sentence_label
        remedy = (
            f"no weights make it so if the loss has a mean over {others[0]}, too: pass a loss_fn= that divides the sum "
            "of each by its number in the whole batch, and reduction='sum'"
        )
    elif loss is None:
        remedy += (
            " (target[:, 1:] in both places, if the model shifts its labels; leave it out if its loss is a mean over "
            "samples, as that of CTC is with ctc_loss_reduction='mean')"
        )
    return (
        f"targets of {rule.ignored} are ignored, and the microbatches have {counts} others: the mean of their losses "
        f"is not that of the batch, and NaN for a microbatch without any; {remedy}"
    )


def _remedy(rule: _Reduction) -> str:
    """Describe what to pass."""
    counted = f"target != {rule.ignored}"
    weight = f"({counted}).sum()" if rule.weight is None else f"weight[target[{counted}]].sum()"
    return f"pass reduction=lambda target: {weight} to penstock.pipeline"


def _find_reduction(loss: Callable[..., Any] | None) -> _Reduction | None:
    """Return how a loss of torch's reduces; None for others."""
    options = _torch_options(loss)
    if options.get("reduction") not in ("mean", "batchmean", "sum"):
        return None
    function, _ = _plain_function(loss)
    has_classes = isinstance(function, (nn.CrossEntropyLoss, nn.NLLLoss)) or function in (F.cross_entropy, F.nll_loss)
    return _Reduction(options["reduction"], *((options["weight"], options["ignore_index"]) if has_classes else ()))


def _torch_options(loss: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the arguments of a loss of torch's; none of others."""
    if loss is None or may_draw(loss):
        return {}
    function, options = _plain_function(loss)
    if isinstance(function, nn.Module):
        return {**vars(function), **function._buffers}
    return _defaults(function) | options


@cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(function).parameters.items()}


def is_torch_loss(loss: Callable[..., Any] | None) -> bool:
    """Whether a loss is a function or a module of torch's own, which draws from torch's generators alone."""
    function, _ = _plain_function(loss)
    return (getattr(function, "__module__", None) or "").split(".")[0] == "torch"


def may_draw(loss: Callable[..., Any] | None) -> bool:
    """Whether a loss may draw random numbers: torch's own losses do not."""
    if loss is None:
        return False
    function, _ = _plain_function(loss)
    if isinstance(function, nn.Module):
        takes_a_function = isinstance(function, nn.TripletMarginWithDistanceLoss) or "forward" in vars(function)
        return takes_a_function or type(function).__module__ != nn.modules.loss.__name__
    return not any(function is torch_loss for torch_loss in _LOSSES)


def _plain_function(loss: Callable[..., Any] | None) -> tuple[Any, dict[str, Any]]:
    """Return the function or module that a loss is made of (None for a module with parts or hooks, which are the
    user's), and the keyword arguments that partials set."""
    function: Any = None if loss is None else inspect.unwrap(loss)
    keywords: dict[str, Any] = {}
    while isinstance(function, partial):
        keywords, function = {**function.keywords, **keywords}, function.func
    is_module = isinstance(function, nn.Module)
    if is_module and (function._modules or function._forward_hooks or function._forward_pre_hooks):
        return None, {}
    return function, keywords


_LOSSES = tuple(
    function
    for name, function in vars(F).items()
    if name.endswith(("_loss", "cross_entropy", "_with_logits")) and "distance" not in name  # which calls the user's
)
"""Torch's own losses that are functions."""
