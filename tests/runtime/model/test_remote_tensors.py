"""What has no values on a rank is not computed with, where torch would not mind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.runtime.model.remote_tensors import make_remote

WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "add_": lambda mine, theirs: mine.add_(theirs, alpha=0.1),
    "of a product": lambda mine, theirs: mine.mul_(0.9).add_(0.1 * theirs),
    "data": lambda mine, theirs: mine.data.sub_(theirs.data),
    "operator": lambda mine, theirs: mine.__iadd__(theirs.detach()),
    "foreach": lambda mine, theirs: torch._foreach_add_([mine], [theirs]),
    "out": lambda mine, theirs: torch.add(theirs, theirs, out=mine),
    "matrix product": lambda mine, theirs: mine.mm(theirs),
    "sum": lambda mine, theirs: mine + theirs,
    "item": lambda mine, theirs: theirs.sum().item(),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("made", [torch.ones(3, 3), nn.Parameter(torch.ones(3, 3))], ids=["buffer", "parameter"])
def test_what_lies_elsewhere_is_not_computed_with(way: str, made: Tensor) -> None:
    mine, theirs = torch.ones(3, 3), make_remote(made, "student.weight")
    with (
        torch.no_grad(),
        pytest.raises(penstock.ArgumentError, match=r"'student\.weight' has no values on this rank") as e,
    ):
        WAYS[way](mine, theirs)
    assert "To run the model, call pipe.predict; to save it, call penstock.checkpoint.export_safetensors" in str(
        e.value
    )
    assert mine.eq(torch.full((3, 3), 0.9 if way == "of a product" else 1.0)).all()


def test_what_lies_elsewhere_may_be_looked_at_copied_and_written_to() -> None:
    layer = nn.Linear(3, 3)
    layer.weight = make_remote(layer.weight.requires_grad_(False), "weight")  # type: ignore[assignment]
    assert isinstance(layer.weight, nn.Parameter)
    assert layer.weight.is_meta
    assert not layer.weight.requires_grad
    assert layer.weight.shape == (3, 3)
    assert layer.weight.grad is None
    with torch.no_grad():
        layer.weight.mul_(0.9).add_(torch.ones(3, 3))  # the rank that has it does so
        assert nn.init.zeros_(layer.weight) is layer.weight
        assert not torch.zeros_like(layer.weight, device="cpu").is_meta
    layer.register_buffer("there", make_remote(torch.ones(3), "there"))
    assert copy.deepcopy(layer).there.is_meta
    for again in (copy.deepcopy(layer), copy.copy(layer)):
        assert isinstance(again.weight, nn.Parameter)
        with torch.no_grad(), pytest.raises(penstock.ArgumentError, match="no values on this rank"):
            torch.ones(3, 3).add_(again.weight)


def test_what_lies_elsewhere_is_not_saved() -> None:
    layer = nn.Linear(3, 3)
    layer.weight = make_remote(layer.weight, "0.weight")  # type: ignore[assignment]
    with pytest.raises(penstock.ArgumentError, match=r"'0\.weight' has no values.*export_safetensors\(path, pipe\)"):
        torch.save(layer.state_dict(), io.BytesIO())
    with pytest.raises(penstock.ArgumentError, match=r"'0\.weight' has no values.*export_safetensors\(path, pipe\)"):
        pickle.dumps(dict(layer.named_parameters()))


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "normal_": lambda theirs: theirs.normal_(),
    "of data": lambda theirs: theirs.data.uniform_(),
    "init": nn.init.normal_,
    "kaiming": nn.init.kaiming_uniform_,
    "truncated": nn.init.trunc_normal_,
    "orthogonal": nn.init.orthogonal_,
    "like": torch.randn_like,
}


@pytest.mark.parametrize("way", DRAWS)
def test_nothing_is_drawn_for_what_lies_elsewhere(way: str) -> None:
    """On one device the draws would come before those of this rank's own parameters."""
    with pytest.raises(penstock.ArgumentError, match=r"'0\.weight' has no values .* nothing would be drawn"):
        DRAWS[way](make_remote(nn.Parameter(torch.ones(3, 3)), "0.weight"))
