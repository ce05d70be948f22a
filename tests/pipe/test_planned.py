"""A pipeline follows a plan: the same bits as with the arguments that the plan decides, or one clear refusal."""

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock import ArgumentError, PartitionError, pipeline
from penstock.costs import ModelFingerprint
from penstock.distributed.world import World
from penstock.pipe.apply_plan import DEFAULTS, AppliedPlan
from penstock.plan import ParallelConfig, Plan
from penstock.plan.plan import VARIABLE
from scaffolding.models import squared_error
from scaffolding.small import batch, mlp

X, Y = batch()
PLAN = Plan(
    ParallelConfig(1, 2, 2, "interleaved-1f1b", 4, 3),
    ("1", "3", "4"),
    (0, 2),
    (1.0,) * 4,
    9.0,
    0.0,
    {},
    (1.0, 1.0),
    (2.0, 2.0),
)


def _made_for(
    shape: tuple[int, ...] | None = None, device: str = "cpu", dtype: str = "float32", threads: int = 0
) -> ModelFingerprint:
    """What the model is, or something else."""
    parameters = {name: tuple(p.shape) for name, p in mlp().named_parameters()}
    return ModelFingerprint({**parameters, "0.weight": shape} if shape else parameters, device, dtype, threads)


def _gradients(**options: object) -> tuple[tuple[str, ...], str, list[torch.Tensor]]:
    with pipeline(mlp(), (X,), loss_fn=squared_error, **options) as pipe:  # type: ignore[arg-type]
        pipe.step(X, target=Y)
        found = [parameter.grad for parameter in pipe.parameters()]
        return pipe.cuts, pipe.schedule.name, [each for each in found if each is not None]


def test_a_plan_decides_what_its_arguments_would(tmp_path: Path) -> None:
    PLAN.save(tmp_path / "plan.json")
    by_hand = _gradients(
        ranks=2,
        schedule="interleaved-1f1b",
        stages_per_rank=2,
        microbatches=4,
        cuts=["1", "3", "4"],
        recompute={0: "always", 2: "always"},
    )
    for plan in (PLAN, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        cuts, name, gradients = _gradients(plan=plan)
        assert (cuts, name) == by_hand[:2] == (PLAN.cuts, "interleaved-1f1b")
        assert len(gradients) == len(by_hand[2])
        assert all(torch.equal(one, other) for one, other in zip(gradients, by_hand[2], strict=True))
    with pipeline(mlp(), (X,), loss_fn=squared_error, plan=PLAN) as pipe:
        assert pipe.session.options.recompute == {0: "always", 2: "always"}


def test_a_batch_of_another_size_is_not_the_planned_one() -> None:
    larger = torch.cat([X, X])
    with (
        pytest.warns(UserWarning, match="for microbatches of 3 rows, and the example's have 6"),
        pipeline(mlp(), (larger,), loss_fn=squared_error, plan=PLAN) as pipe,
    ):
        assert pipe.cuts == PLAN.cuts


def test_the_plan_of_penstock_run_goes_before_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    PLAN.save(tmp_path / "plan.json")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "plan.json"))
    with pytest.warns(UserWarning, match="microbatches: overridden by the plan .*plan.json of penstock run"):
        assert _gradients(microbatches=8)[:2] == (PLAN.cuts, "interleaved-1f1b")
    applied = AppliedPlan.of(None, {**DEFAULTS, "microbatches": 8})
    first, second = (World(2, rank, (2, 3)) for rank in (0, 1))  # on part of a job, whose first process has no plan
    with pytest.warns(match="overridden"), pytest.warns(match="not arranged as in the plan"):
        applied.check(first, mlp(), "cpu")
    with pytest.warns(match="microbatches of 3 rows"):
        applied.check_rows(first, 7)
    with warnings.catch_warnings(action="error"):
        applied.check(second, mlp(), "cpu")
        applied.check_rows(second, 7)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"plan": PLAN, "microbatches": 4}, "plan= already decides microbatches"),
        ({"plan": PLAN, "cuts": ["4"], "schedule": "gpipe"}, "plan= already decides schedule, cuts"),
        ({"plan": PLAN, "ranks": 4}, r"is for 1 x 2 ranks .* there are 1 x 4"),
        ({"plan": 7}, "plan=7: expected a penstock.plan.Plan"),
        ({"plan": "nowhere.json"}, "plan 'nowhere.json' cannot be read"),
        ({"plan": replace(PLAN, choice=replace(PLAN.choice, replicas=3))}, r"mesh=init_device_mesh\(type, \(3, 2\)"),
        ({"plan": replace(PLAN, cuts=("1", "none", "4"))}, "none"),
        ({"plan": replace(PLAN, made_for=_made_for(shape=(2, 2)))}, r"its '0.weight' is \[2, 2\], and the model's \["),
        ({"plan": replace(PLAN, made_for=_made_for(device="cuda"))}, "made for device 'cuda', and this is 'cpu'"),
        ({"plan": replace(PLAN, made_for=_made_for(dtype="bfloat16"))}, "for dtype 'bfloat16', and this is 'float32'"),
        ({"plan": replace(PLAN, made_for=_made_for(), cuts=("1", "none", "4"))}, "none"),
        ({"plan": PLAN, "offload": True}, "plan= already decides offload"),
    ],
)
def test_what_does_not_go_with_a_plan_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises((ArgumentError, PartitionError), match=message):
        _gradients(**given)


def test_a_plan_of_other_threads_says_so(recwarn: pytest.WarningsRecorder) -> None:
    here = torch.get_num_threads()
    for threads in (0, here, here + 1):
        with pipeline(mlp(), (X,), loss_fn=squared_error, plan=replace(PLAN, made_for=_made_for(threads=threads))):
            pass
    (said,) = (str(one.message) for one in recwarn if "thread" in str(one.message))
    assert f"the plan's times are of {here + 1} threads per rank, and this one has {here}: " in said
