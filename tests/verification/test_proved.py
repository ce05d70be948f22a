"""A pipeline is unverified until its model, schedule and options have passed `verify`, which its first step can do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import penstock
from penstock import VerificationError, pipeline, verify
from penstock.cli import app
from penstock.pipe import verified
from penstock.report.web.run_folder import _facts
from penstock.runtime.loss.loss import LossHead
from penstock.trace.runs import read_run
from scaffolding.models import GPT, squared_error, token_error
from scaffolding.ranks import Ranks
from scaffolding.small import WIDTH, batch, mlp

X, Y = batch()
OPTIONS: dict[str, Any] = {"ranks": 2, "microbatches": 4, "loss_fn": squared_error}


@pytest.fixture(autouse=True)
def _nothing_has_passed() -> Iterator[None]:
    """In the processes of tests others have verified the same."""
    before = {*verified.verified_fingerprints}
    verified.verified_fingerprints.clear()
    yield
    verified.verified_fingerprints.clear()
    verified.verified_fingerprints.update(before)


class Block(nn.Linear):
    """A layer of the user's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class SameBlock(nn.Linear):
    """Also called Block, as after an edit of the file."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sigmoid()


SameBlock.__name__, SameBlock.__qualname__ = Block.__name__, Block.__qualname__


def blocks(kind: type[nn.Linear] = Block, dropout: float = 0.1) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(WIDTH, WIDTH) for _ in range(4)), nn.Dropout(dropout))


def frozen() -> nn.Module:
    model = blocks()
    model[1].weight.requires_grad_(False)  # type: ignore[index, union-attr]
    return model


def other_loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).abs().mean()


def is_verified(make: Callable[[], nn.Module] = blocks, **options: Any) -> bool:
    with pipeline(make(), (X,), **{**OPTIONS, "cuts": ["2"], **options}) as pipe:
        assert ("verified" in str(pipe).splitlines()[0].split(", ")) == pipe.verified
        assert any(note.startswith("unverified: ") for note in pipe.notes) == (not pipe.verified)
        return pipe.verified


# -- what counts as verified ------------------------------------------------------------------------------------------


def test_a_pipeline_is_unverified_until_it_has_passed() -> None:
    assert not is_verified()
    report = verify(blocks, (X,), target=Y, cuts=["2"], **OPTIONS)
    assert report.ok
    assert report.notes == ()  # nothing about itself
    assert is_verified()
    assert is_verified(seed=3)


def test_what_has_passed_holds_for_nothing_else() -> None:
    """For no other code, setting, frozen parameter, cuts, schedule, loss, or option."""

    def nothing(stage: Any) -> None:
        """Makes no feature."""

    assert verify(blocks, (X,), target=Y, cuts=["2"], **OPTIONS).ok
    assert is_verified()
    others: list[dict[str, Any]] = [
        {"make": lambda: blocks(SameBlock)}, {"make": lambda: blocks(dropout=0.2)}, {"make": frozen}, {"cuts": ["1"]},
        {"schedule": "gpipe"}, {"microbatches": 2}, {"recompute": "always"}, {"loss_fn": other_loss},
        {"deferred_batch_norm": True}, {"features": [nothing]},
    ]  # fmt: skip
    assert [other for other in others if is_verified(**other)] == []
    nothing.__module__ = "penstock.verification.states"
    assert is_verified(features=[nothing])


def test_what_differs_is_not_verified() -> None:
    with planted():
        assert not verify(blocks, (X,), target=Y, cuts=["2"], **OPTIONS).ok
    assert not is_verified()


def test_an_inspection_says_nothing_of_it() -> None:
    assert penstock.inspect(blocks(), (X,), microbatches=4).notes == ()


# -- in the first step ------------------------------------------------------------------------------------------------


def planted() -> Any:
    """The last stage doubles the gradient of one microbatch."""
    seed = LossHead.seed

    def wrong(self: LossHead, microbatch: int) -> Any:
        return seed(self, microbatch) * (2 if microbatch == 1 else 1)

    return mock.patch.object(LossHead, "seed", wrong)


def trained(steps: int = 3, **options: Any) -> tuple[list[Tensor], list[float], Tensor, bool]:
    model = blocks()
    with pipeline(model, (X,), **{**OPTIONS, **options}) as pipe:
        losses = [float(pipe.step(X, target=Y).loss) for _ in range(steps)]
        done = pipe.verified
    return [p.grad for p in model.parameters() if p.grad is not None], losses, torch.get_rng_state(), done


def test_the_first_step_verifies_and_the_training_is_the_same() -> None:
    gradients, losses, generator, done = trained()
    with_it = trained(verify=True)
    assert (done, with_it[3]) == (False, True)
    assert with_it[1] == losses
    assert torch.equal(with_it[2], generator)
    assert all(map(torch.equal, with_it[0], gradients))


def test_the_first_step_stops_with_the_finding() -> None:
    model = blocks()
    with planted(), pipeline(model, (X,), **OPTIONS, verify=True) as pipe:
        for _ in range(2):
            with pytest.raises(VerificationError, match="the first is gradient"):
                pipe.step(X, target=Y)
        assert not pipe.verified
    assert all(parameter.grad is None for parameter in model.parameters())
    assert pipe.step_count == 0


def test_the_copy_goes_once_it_has_passed() -> None:
    with pipeline(blocks(), (X,), **OPTIONS, verify=True) as pipe:
        pipe.step(X, target=Y)
        assert pipe.session.first_step is None
    with pipeline(blocks(), (X,), **OPTIONS, verify=True) as pipe, planted():
        pipe.step(X, target=Y)  # has passed: not again


def test_the_first_step_warns_of_a_loss_that_is_no_mean_over_rows() -> None:
    options = {**OPTIONS, "loss_fn": lambda output, target: ((output - target) ** 2).sum()}
    with pipeline(blocks(), (X,), **options, verify=True) as pipe:
        with pytest.warns(UserWarning, match=r"verify=True\): the microbatches' loss is .*pass reduction='sum'"):
            pipe.step(X, target=Y)
        assert pipe.verified


def test_parameters_frozen_after_building_are_frozen_in_the_copy() -> None:
    model = blocks()
    with pipeline(model, (X,), **OPTIONS, verify=True) as pipe:
        model[0].weight.requires_grad_(False)  # type: ignore[index, union-attr]
        pipe.step(X, target=Y)
        assert pipe.verified


def test_penstock_run_asks_for_it(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with mock.patch.dict(os.environ), mock.patch("penstock.cli.run.launch", return_value=0) as launch:
        result = CliRunner().invoke(app, ["run", "--ranks", "2", "--verify", str(tmp_path / "train.py")])
        assert (result.exit_code, launch.call_count) == (0, 1)
        with pipeline(blocks(), (X,), **OPTIONS) as pipe:
            assert pipe.session.first_step is not None
        with pipeline(blocks(), (X,), **OPTIONS, verify=False) as pipe:
            assert pipe.session.first_step is None
        assert trained(1)[3]


# -- in the folder of a run -------------------------------------------------------------------------------------------


def test_a_run_says_whether_it_is_verified_and_a_resumed_one_still_is(tmp_path: Path) -> None:
    said = []
    for options in ({}, {"verify": True}, {}, {"cuts": ["1"]}):
        verified.verified_fingerprints.clear()  # as in a new process
        with pipeline(mlp(), (X,), **{**OPTIONS, "run_dir": tmp_path / "run", "cuts": ["4"], **options}) as pipe:
            pipe.step_count = 5  # resumed from a checkpoint
            pipe.step(X, target=Y)
        about = read_run(tmp_path / "run").about
        said.append((bool(about.verified), dict(_facts(read_run(tmp_path / "run")))["compared with one device"]))
    assert said == [(False, "unverified"), (True, "verified"), (True, "verified"), (False, "unverified")]


# -- on several ranks -------------------------------------------------------------------------------------------------


def first_step(_: int, spoiled: bool) -> Any:
    """Each rank passes only what it needs, as a data loader of its own would. Returns whether it is verified before and
    after the first step, and the losses with and without; or the error."""
    verified.verified_fingerprints.clear()
    losses, done = [], []
    for ask in (True, False):
        torch.manual_seed(0)
        ids = torch.randint(0, 19, (4, 7))
        args, target = (ids[:, :-1].clone(),), ids[:, 1:].clone()
        with planted() if spoiled else nullcontext():
            pipe = penstock.pipeline(GPT(), args, microbatches=2, loss_fn=token_error, verify=ask)
            done.append(pipe.verified)
            args = args if pipe.needs_inputs else ()
            try:
                losses.append(float(pipe.step(*args, target=target if pipe.needs_targets else None).loss))
            except VerificationError as error:
                return str(error)
            finally:
                pipe.close()
    return done[0], losses, done[1]


def test_ranks_verify_together(ranks2: Ranks) -> None:
    for before, losses, after in ranks2.run(first_step, False):
        assert (before, after) == (False, True)
        assert losses[0] == losses[1]


def test_ranks_stop_together(ranks2: Ranks) -> None:
    texts = ranks2.run(first_step, True)
    assert texts[0] == texts[1]
    assert "differ; the first is gradient" in texts[0]
