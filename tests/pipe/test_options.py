"""Trap 17: every option of `pipeline` is used or refused. Bad input is refused by name, with what to do."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B

import penstock
from penstock import ArgumentError, NonFiniteError, PartitionError, ShapeError, pipeline, verify
from penstock.plan import ParallelConfig, Plan
from penstock.runtime.features.feature import NOTHING, Context, Feature, StageContext
from penstock.runtime.step.results import SharedLoss, StepResult
from penstock.schedule import generate
from penstock.simulate import LinkCost
from scaffolding.models import OneLayer, SkipsTwice, squared_error
from scaffolding.small import WIDTH, batch, mlp

# -- 17: options ------------------------------------------------------------------------------------------------------


X, Y = batch()


def made(**options: Any) -> penstock.Pipeline:
    given = {"ranks": 2, "microbatches": 2, "loss_fn": squared_error, **options}
    model = given.pop("model", None) or mlp()
    return pipeline(model, given.pop("args", (X,)), given.pop("kwargs", None), **given)


def refused(error: type[Exception], match: str, **options: Any) -> None:
    with pytest.raises(error, match=match):
        made(**options)


def step(**options: Any) -> penstock.StepResult:
    with made(**options) as pipe:
        return pipe.step(X, target=Y)


def shows_kwargs() -> None:
    with made(args=(), kwargs={"input": X}, model=mlp(1), ranks=1) as pipe:
        loss = pipe.step(input=X, target=Y).loss
    assert loss == step(model=mlp(1), ranks=1).loss


PLAN = Plan(ParallelConfig(1, 2, 1, "1f1b", 4, 2), ("4",), (), (1.0, 1.0), 9.0, 0.0, {}, (1.0, 1.0), (2.0, 2.0))


def shows_balance() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 400), nn.Linear(400, WIDTH), *mlp(4))
    assert made(model=model, balance="layers").cuts != made(model=model, balance="parameters").cuts
    expected = "pass 'memory'; expected one of 'time', 'flops', 'memory', 'parameters'"
    refused(ArgumentError, f"balance='size': {expected}", balance="size")
    assert made(model=model, balance=lambda name, module: name in "01").cuts == ("1",)
    assert made(model=model, balance="type:Linear").cuts == made(model=model, balance="layers").cuts


def shows_memory_limit() -> None:
    given = {"model": mlp(8), "args": (torch.randn(400, WIDTH),), "ranks": 4, "microbatches": 4, "balance": "flops"}
    assert made(**given).cuts == ("2", "4", "6")
    assert made(**given, memory_limit=36_000).cuts == ("1", "3", "6")  # 1f1b: 4 microbatches in flight, 3, 2, 1
    assert made(**{**given, "balance": "memory"}).cuts == ("1", "2", "4")
    refused(ArgumentError, "memory_limit=20,000 bytes: no cut into 4 stages fits. The best", **given, memory_limit=2e4)
    two = {"stages_per_rank": 2, "schedule": "gpipe"}
    refused(ArgumentError, "a rank's memory is shared equally by its 2 stages", memory_limit=9, **two)
    refused(ArgumentError, "memory_limit='80GiB': expected a number of bytes", memory_limit="80GiB")
    refused(ArgumentError, "memory_limit=9: it is for cuts that are found", memory_limit=9, cuts=["2"])


def shows_link() -> None:
    layers = [nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH), nn.Linear(WIDTH, 100), nn.Linear(100, WIDTH)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, WIDTH))
    found = penstock.profile(model, (X,), microbatches=1, budget_seconds=0)
    even = replace(
        found, units=tuple(replace(u, forward_seconds=1.0, weight_gradient_seconds=0.0) for u in found.units)
    )
    even = replace(even, units=tuple(replace(unit, input_gradient_seconds=0.0) for unit in even.units))
    fast, slow = LinkCost(0.0, 1e9), LinkCost(0.0, 1.0)
    assert made(model=model, balance=even, link=fast).cuts == ("2",)
    assert made(model=model, balance=even, link=slow).cuts == ("1",)  # where two numbers a row cross
    refused(ArgumentError, "link_cost='fast': expected a penstock.simulate.LinkCost", link="fast")
    refused(ArgumentError, "it is for cuts by time, but balance='flops' asks for others", link=fast, balance="flops")
    refused(ArgumentError, "it is for cuts by time, but cuts= says where they are", link=fast, cuts=["2"])


def shows_leaves() -> None:
    whole = nn.Module()
    whole.inner, whole.head = SkipsTwice(WIDTH), nn.Linear(WIDTH, WIDTH)
    whole.forward = lambda x: whole.head(whole.inner(x))  # type: ignore[method-assign]
    assert "self.inner.layers" in made(model=whole).stage_code
    assert "self.inner.layers" not in made(model=whole, leaf_modules=["inner"]).stage_code
    refused(PartitionError, r"leaf_modules: .*'iner'.*'inner'", model=whole, leaf_modules=["iner"])


def shows_opens() -> None:
    model = nn.Sequential(OrderedDict(inner=SkipsTwice(WIDTH), head=nn.Linear(WIDTH, WIDTH)))
    assert "self.inner.layers" not in made(model=model).stage_code
    assert "self.inner.layers" in made(model=model, split_inside=["inner"]).stage_code
    refused(PartitionError, r"split_inside: .*'iner'.*'inner'", model=model, split_inside=["iner"])


def shows_materialize() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    seen = []

    def rule(name: str, module: nn.Module) -> None:
        seen.append(name)
        for parameter in module.parameters():
            nn.init.constant_(parameter, 0.25)

    with made(model=model, materialize=rule) as pipe:
        assert all((p == 0.25).all() for p in pipe.parameters())
    assert seen == ["0", "1"]


def notes_have(words: str, **options: Any) -> None:
    assert any(words in note for note in made(**options).notes)


def shows_compiled() -> None:
    assert any("compiled" in note for note in made(compile={"backend": "eager"}).notes)
    refused(ArgumentError, "compile=1: expected True, False, or a dict", compile=1)


class Forwards(Feature):
    """Notes the stages that run forwards."""

    seen: ClassVar[list[int]] = []

    def __init__(self, stage: StageContext) -> None:
        self.index = stage.index

    @classmethod
    def of(cls, stage: StageContext) -> Feature | None:
        return None if stage.index == 0 else cls(stage)

    def code(self, microbatch: int) -> Context:
        self.seen.append(self.index)
        return NOTHING


class Misspelt(Feature):
    """Has a method that is not a hook."""

    def codes(self, microbatch: int) -> Context:
        return NOTHING


def shows_features() -> None:
    Forwards.seen.clear()
    with made(features=[Forwards.of]) as pipe:
        pipe.step(X, target=Y)
        pipe.predict(X)
    assert Forwards.seen == [1] * 4
    assert verify(mlp(), (X,), target=Y, loss_fn=squared_error, ranks=2, features=[Forwards.of]).ok
    assert set(Forwards.seen[4:]) == {1}
    refused(
        ArgumentError, r"features: Forwards is a class; pass what makes a stage's: Forwards\.of", features=[Forwards]
    )
    refused(ArgumentError, r"features=Forwards: expected a list of functions that", features="Forwards")
    refused(
        ArgumentError,
        r"Misspelt, which .*<lambda> made for stage 0, overrides no hook",
        features=[lambda _: Misspelt()],
    )
    with pytest.raises(TypeError) as caught:
        made(features=[lambda: None])
    assert "while features= called shows_features.<locals>.<lambda> with the StageContext" in caught.value.__notes__[0]
    refused(ArgumentError, r"features: \S*<lambda> made an object of int for stage 0; expected", features=[lambda _: 3])
    refused(ArgumentError, r"recompute: \S*<lambda> made an object of int for stage 0", recompute=lambda _: 3)
    refused(ArgumentError, r"recompute: Forwards is a class; pass .*Forwards\.of", recompute=[Forwards, "never"])


def shows_check_finite() -> None:
    with pytest.raises(NonFiniteError, match="the loss is NaN"):
        step(check_finite=True, loss_fn=lambda output, _: output.sum() * float("nan"))
    refused(ArgumentError, "check_finite='no': expected True or False", check_finite="no")


def shows_parallelize() -> None:
    given: list[set[str]] = []

    def look(stage: nn.Module) -> None:
        given.append({name for name, _ in stage.named_parameters()})

    with made(parallelize=look) as pipe:
        assert given == [set(stage.parameters) for stage in pipe.stages]
        pipe.step(X, target=Y)
    refused(ArgumentError, "parallelize returned a Sequential", parallelize=nn.Sequential)


def shows_batch_dims() -> None:
    refused(ArgumentError, "batch_dims='rows': expected a dimension for all", batch_dims="rows")
    with made(batch_dims=1, args=(X.t(),), model=Turned()) as pipe:
        torch.testing.assert_close(pipe.predict(X.t()), mlp()(X).t().detach())


def shows_cutting() -> None:
    def split(args: Any, kwargs: Any, target: Any, count: int) -> list[penstock.Microbatch]:
        wanted = [None] * 2 if target is None else [target[:1], target[1:]]
        pieces = [args[0][:1], args[0][1:]]
        return [penstock.Microbatch((piece,), {}, one) for piece, one in zip(pieces, wanted, strict=True)]

    assert step(split=split).sizes == (1, len(X) - 1)
    with made(merge=len) as pipe:
        assert pipe.predict(X) == 2


class Turned(nn.Module):
    """With the batch in the second dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.t()).t()


def shows_unshard_window() -> None:
    """What it does is seen by sharded stages: tests/distributed/test_windows.py."""
    for wrong in (0, True, "all"):
        refused(ArgumentError, f"unshard_window={wrong!r}: expected an integer >= 1", unshard_window=wrong)
    refused(ArgumentError, "unshard_window=2: it is for stages that parallelize= applies", unshard_window=2)


def one_rank_mesh() -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", [0], _init_backend=False, _rank=0)


def refused_in(run: Callable[[], Any], match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        run()


def assert_equal(one: Any, other: Any) -> None:
    assert one == other


SHOWN: dict[str, Callable[[], None]] = {
    "batch_dims": shows_batch_dims,
    "split_fn": shows_cutting,
    "merge_fn": shows_cutting,
    "model": lambda: refused(ArgumentError, "model", model=[1, 2]),
    "args": lambda: refused(ShapeError, "example: no tensor with rows", args=()),
    "kwargs": shows_kwargs,
    "ranks": lambda: assert_equal(made(ranks=3).world.ranks, 3),
    "stages_per_rank": lambda: assert_equal(len(made(stages_per_rank=3, schedule="gpipe").stages), 6),
    "schedule": lambda: assert_equal(made(schedule="naive").schedule.name, "naive"),
    "microbatches": lambda: assert_equal(len(step(microbatches=7).losses), 7),
    "loss_fn": lambda: assert_equal(float(step(loss_fn=lambda output, _: output.sum() * 0 + 3).loss), 3.0),
    "reduction": lambda: refused_in(lambda: step(reduction="median"), "reduction='median'"),
    "cuts": lambda: assert_equal(made(cuts=["4"]).cuts, ("4",)),
    "leaf_modules": shows_leaves,
    "split_inside": shows_opens,
    "balance": shows_balance,
    "memory_limit": shows_memory_limit,
    "link_cost": shows_link,
    "plan": lambda: refused(ArgumentError, "plan= already decides microbatches", plan=PLAN),
    "mesh": lambda: refused(ArgumentError, "ranks=2, but the mesh has 1", mesh=one_rank_mesh()),
    "devices": lambda: refused(ArgumentError, "devices has 1 entry; expected one for each of 2", devices=["cpu"]),
    "broadcast_loss": lambda: assert_equal(step(broadcast_loss=False).loss.shape, ()),  # seen on other ranks only
    "materialize": shows_materialize,
    "seed": lambda: assert_equal(made(seed=3).seed, 3),
    "recompute": lambda: refused(ArgumentError, "recompute='sometimes': expected 'never'", recompute="sometimes"),
    "offload": lambda: notes_have("offload: stages 0-1", schedule="gpipe", microbatches=4, offload=True),
    "deferred_batch_norm": lambda: notes_have("deferred_batch_norm=True does nothing", deferred_batch_norm=True),
    "compile": shows_compiled,
    "check_finite": shows_check_finite,
    "features": shows_features,
    "grad_dtype": lambda: refused(ArgumentError, "grad_dtype='float32': expected torch.f", grad_dtype="float32"),
    "parallelize": shows_parallelize,
    "unshard_window": shows_unshard_window,
    # How long it waits is seen over a network that is silent: tests/distributed/test_bad_network.py.
    "heartbeat_timeout": lambda: refused(
        ArgumentError, "heartbeat_timeout=0: expected seconds >= 1", heartbeat_timeout=0
    ),
    # What torch is told: tests/distributed/test_process_groups.py.
    "pg_timeout": lambda: refused(ArgumentError, "pg_timeout=True: expected seconds", pg_timeout=True),
    # What it records: tests/pipe/test_recorder.py.
    "verify": lambda: refused(ArgumentError, "verify='yes': expected True, False or None", verify="yes"),
    "run_dir": lambda: refused(ArgumentError, "run_dir=3: expected a folder to record the run in", run_dir=3),
}
"""For each option of `pipeline`, what shows that it is used."""

SEEN_ELSEWHERE = {"transport", "pg_options"}  # in tests/distributed: they have no meaning in one process


@pytest.mark.parametrize("option", SHOWN)
def test_trap_17_every_option_is_used(option: str) -> None:
    SHOWN[option]()


def test_trap_17_no_option_is_left_out() -> None:
    assert set(inspect.signature(pipeline).parameters) - SEEN_ELSEWHERE == set(SHOWN)
    with pytest.raises(TypeError, match=r"pipeline\(\) has no argument unknown_option=$"):
        pipeline(mlp(), batch()[:1], unknown_option=1)  # type: ignore[call-arg]
    for name in ("micro_batches", "num_microbatches", "microbatch"):
        with pytest.raises(TypeError, match=rf"no argument {name}=; did you mean microbatches=\?"):
            pipeline(mlp(), batch()[:1], **{name: 2})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"checkpoint": "always"}, "pass recompute='always'"),
        ({"split_spec": {}}, r"pass cuts=\['blocks.5'\]"),
        ({"num_stages": 2}, "pass ranks="),
        ({"scale_grads": False}, "omit it: gradients are those of the whole batch's loss"),
        ({"losses": []}, "read result.losses"),
        ({"micro_batch_size": 4}, "pass microbatches=, samples per batch / samples per microbatch"),
        ({"batch_size": 4}, "omit it: batches have their size; pass microbatches=, the number of their pieces"),
        ({"gradient_accumulation_steps": 4}, "pass microbatches="),
        ({"pipeline_model_parallel_size": 2}, "pass ranks="),
        ({"loss_function": None}, "pass loss_fn="),
        ({"precision": 16}, "omit it: call step\\(\\) under torch.autocast"),
        ({"interleave": 2}, "pass stages_per_rank="),
        ({"replicas": 2}, "pass mesh=, a DeviceMesh with dimensions 'dp' and 'pp'"),
    ],
)
def test_an_option_of_a_peer_leads_to_the_right_name(option: dict[str, Any], instead: str) -> None:
    for verb in (pipeline, verify, penstock.inspect):
        with pytest.raises(TypeError, match=f"no argument {next(iter(option))}=; {instead}"):
            verb(mlp(), (X,), **option)


def test_methods_of_peers_lead_to_the_right_ones() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'PipelineModule'; call penstock.pipeline\("):
        _ = penstock.PipelineModule
    with made() as pipe:
        for name, instead in {
            "train_batch": r"call step\(\*inputs, target=...\)",
            "forward_backward": r"call step\(\*inputs, target=...\)",
            "eval_batch": r"call evaluate\(\*inputs\) or predict",
            "module": "use pipe.model",
            "save_checkpoint": "call penstock.checkpoint.save",
            "cuda": "set it before you call penstock.pipeline",
        }.items():
            with pytest.raises(AttributeError, match=f"'Pipeline' object has no attribute '{name}'; .*{instead}"):
                getattr(pipe, name)
        with pytest.raises(AttributeError, match=r"no attribute 'unheard_of'$"):
            pipe.unheard_of  # noqa: B018
        with pytest.raises(TypeError, match=r"not callable; call step\(\*inputs, target=...\) to train, predict"):
            pipe(X)
        for name, instead in {
            "labels": "pass target= to step",
            "batch_size": "omit it",
            "return_outputs": "outputs=",
        }.items():
            with pytest.raises(TypeError, match=f"{name}=; .*{instead}"):
                pipe.step(X, **{name: Y})


def test_a_steps_misspelt_argument_is_not_taken_for_the_models() -> None:
    with made() as pipe:
        for verb in (pipe.step, pipe.evaluate):
            with pytest.raises(TypeError, match=r"neither a step nor the model .* targets=; did you mean target="):
                verb(X, targets=Y)
        with pytest.raises(TypeError, match=r"argument output=; did you mean outputs="):
            pipe.predict(X, output=True)
        with pytest.raises(
            TypeError, match=r"the model takes no argument labels=, and predict\(\) needs the model's inputs only"
        ):
            pipe.predict(X, labels=Y)
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'mask'"):
            pipe.step(X, mask=Y)
        assert pipe.step(X, target=Y).loss > 0
    with pytest.raises(TypeError, match=r"verify\(\) has no argument targets=; did you mean target=\?"):
        verify(mlp(), (X,), targets=Y, loss_fn=squared_error, ranks=2)
    assert verify(mlp(), (X,), target=Y, loss=squared_error, n_microbatches=2, stages_per_rank=1, ranks=2).ok


def test_an_argument_of_the_model_may_resemble_a_steps() -> None:
    class Doubled(nn.Sequential):
        def forward(self, x: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + targets

    with made(model=Doubled(*mlp()), kwargs={"targets": Y}) as pipe:
        assert pipe.step(X, targets=Y, target=Y).loss > 0


def test_a_model_that_was_converted_is_refused_as_such() -> None:
    model = nn.Sequential(*mlp(3), nn.BatchNorm1d(WIDTH))
    with made(model=model) as pipe:
        pipe.step(X, target=Y)
        model.double()
        with pytest.raises(ArgumentError, match=r"was float32 on cpu .* and is float64 on cpu now: the model was conv"):
            pipe.step(X, target=Y)


class Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.skip = mlp(4), False

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = x if self.skip and number % 2 == 0 else layer(x)
        return x


def test_automatic_cuts_that_a_later_batch_lacks_are_not_called_the_users() -> None:
    chosen = "this batch cannot be cut where Penstock cut the first one, at 'layers.2'"
    for cuts, said in ((None, chosen), (["layers.2"], "cuts: ")):
        with made(model=Skipping(), cuts=cuts) as pipe:
            assert pipe.cuts == ("layers.2",)
            pipe.step(X, target=Y)
            pipe.model.skip = True  # type: ignore[assignment]
            with pytest.raises(PartitionError, match=f"{said}.*'layers.2' never runs for these inputs"):
                pipe.step(X, target=Y)


SECOND_NAMES = {
    "loss": ("loss_fn", squared_error),
    "chunks": ("stages_per_rank", 2),
    "n_microbatches": ("microbatches", 2),
    "example_args": ("args", (X,)),
    "example_kwargs": ("kwargs", {}),
}


@pytest.mark.parametrize("second", SECOND_NAMES)
def test_an_argument_by_its_second_name(second: str) -> None:
    name, value = SECOND_NAMES[second]
    given = {"args": (X,), "ranks": 2, "schedule": "gpipe", "microbatches": 2, "loss_fn": squared_error, name: value}
    with pipeline(mlp(), **given) as pipe:  # type: ignore[arg-type]
        expected = pipe.step(X, target=Y).loss
        stages = len(pipe.stages)
    del given[name]
    with pipeline(mlp(), **given, **{second: value}) as pipe:  # type: ignore[arg-type]
        assert (pipe.step(X, target=Y).loss, len(pipe.stages)) == (expected, stages)
    with pytest.raises(ArgumentError, match=f"{second}= and {name}= are one argument by two names"):
        pipeline(mlp(), **{**given, name: value, second: value})  # type: ignore[arg-type]


def test_what_was_verifys_third_argument_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"kwargs is a Tensor; .* target=\.\.\., the loss as loss_fn="):
        verify(mlp(), (X,), Y)  # type: ignore[arg-type]


def test_a_tuple_and_a_dict_may_be_what_a_model_takes_by_position() -> None:
    class Picks(OneLayer):
        def forward(self, xs: tuple[Tensor, ...], places: dict[str, int]) -> Tensor:
            return self.layer(xs[places["first"]])

    with pipeline(Picks(WIDTH), ((Y, X), {"first": 1}), loss_fn=squared_error, microbatches=2) as pipe:
        assert pipe.predict((Y, X), {"first": 1}).shape == X.shape


def test_a_pair_of_args_and_kwargs_in_args_is_explained() -> None:
    """As a script's make() may return one."""
    with pytest.raises(TypeError) as caught:
        pipeline(mlp(), ((X,), {}), loss_fn=squared_error)
    assert any("a pair of positional and keyword inputs, pass them" in note for note in caught.value.__notes__)


# -- bad input --------------------------------------------------------------------------------------------------------


PEERS = {
    "pipedream-flush": "'1f1b'",
    "PipeDream": "'1f1b', which has no stale weights",
    "OneForwardOneBackward": "'1f1b'",
    "fill-drain": "'gpipe'",
    "ScheduleZBVZeroBubble": "'zb-v'",
    "ZB1P": "'zb-h1'",
}
OF_FIVE = generate("gpipe", 2, 5, 2)

REFUSED: list[tuple[dict[str, Any], str]] = [
    *(({"schedule": name}, rf"did you mean {instead}\? expected one of") for name, instead in PEERS.items()),
    ({"schedule": "1f1f"}, "1f1f.*did you mean '1f1b'.*gpipe"),
    ({"schedule": 3}, "schedule=3: expected a name, such as '1f1b', or a penstock.schedule.Sch"),
    ({"schedule": generate}, "schedule=<function generate.*pass what this returns"),
    ({"schedule": Schedule1F1B}, "Schedule; pass '1f1b'$"),
    ({"schedule": OF_FIVE, "microbatches": 4}, r"microbatches=4, .*'gpipe' is for 5; leave microbatches out"),
    (
        {"schedule": OF_FIVE, "microbatches": None, "stages_per_rank": 3},
        r"stages_per_rank=3, .*'gpipe' has 4 stages on 2 ranks; omit stages_per_rank=",
    ),
    ({"schedule": OF_FIVE, "microbatches": None, "ranks": 3}, "'gpipe'.*2 ranks.*3"),
    ({"ranks": 7}, "at most 6 stages.*7 stages: one on each of 7 ranks"),
    ({"ranks": 0}, "ranks=0.*an integer >= 1"),
    ({"ranks": "2"}, "ranks='2'.*expected an integer"),
    (
        {"stages_per_rank": 8, "schedule": "gpipe"},
        "at most 6 stages.*16 stages: 8 on each of 2 ranks; microbatches= sets the number of",
    ),
    (
        {"stages_per_rank": 8},
        "stages_per_rank=8: 1f1b works with exactly 1 stage per rank.*microbatches= sets the number of pieces",
    ),
    ({"stages_per_rank": 0}, "stages_per_rank=0.*an integer >= 1"),
    ({"microbatches": 2.5}, "microbatches=2.5.*expected an integer"),
    ({"microbatches": True}, "microbatches=True.*expected an integer"),
    ({"cuts": ["9"]}, "cut.*'9'.*it begins with '0', '1'"),
    ({"cuts": ["2", "4"]}, "cuts.*2 stages"),
    ({"cuts": ["4", "2"], "ranks": 3}, "'2'.*'4'|'4'.*'2'"),
    ({"cuts": "1"}, "cuts='1': expected a list"),
    ({"cuts": 1}, "cuts=1: expected a list of names"),
    ({"balance": "uniform"}, "balance='uniform': pass 'layers'; expected one of"),
    ({"balance": [2, 1, 3]}, r"balance=\[2, 1, 3\]: pass cuts=\['2', '3'\]"),
    ({"balance": lambda name: 1}, "balance=.*a function of a module's name and the module"),
    ({"mesh": 2}, "mesh=2: expected a DeviceMesh.*init_device_mesh"),
    ({"devices": "cup"}, "devices: there is no device 'cup'; expected.*'cuda:0'"),
    ({"devices": 1}, "devices=1: expected.*a list with one for each rank"),
    ({"args": 3}, r"args is an int; expected a tuple .* kwargs={'x': x}"),
    ({"args": {"x": X}}, r"args is a dict; expected a tuple .* kwargs={'x': x}"),
    ({"args": X}, r"pass \(x,\)"),
    ({"model": nn.Identity}, r"a class; pass an instance, Identity\(\.\.\.\)"),
    ({"loss_fn": "mse"}, "loss_fn='mse': expected a function"),
    ({"loss_fn": nn.MSELoss(reduction="none")}, "MSELoss with reduction='none'.*expected a scalar"),
    ({"leaf_modules": [1]}, r"leaf_modules=\[1\]: expected a list of names"),
    ({"recompute": "full"}, "recompute='full': pass 'always'; expected"),
    ({"recompute": True}, "recompute=True: pass 'always'; expected"),
    ({"compile": {"backen": 1}}, "torch.compile has no argument 'backen', only backend"),
    ({"broadcast_loss": "no"}, "broadcast_loss='no': expected True or False"),
    ({"deferred_batch_norm": 1}, "deferred_batch_norm=1: expected True or False"),
    ({"materialize": "zeros"}, "materialize='zeros': expected a function"),
    ({"parallelize": True}, "parallelize=True: expected a function"),
    ({"seed": "0"}, "seed='0': expected an integer"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_is_refused_when_it_is_made(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ArgumentError, PartitionError), match=f"(?s){words}"):
        made(**options)


@pytest.mark.parametrize(
    ("options", "given", "words"),
    [
        (
            {"loss_fn": lambda output, _: output},
            {"target": Y},
            r"returned a tensor of shape \[6, 9\]; expected a scalar",
        ),
        ({"loss_fn": lambda output, _: output.sum().item()}, {"target": Y}, "returned float; expected a scalar"),
        ({"loss_fn": lambda output, _: None}, {"target": Y}, "returned None; expected a scalar"),
        ({"loss_fn": None}, {"target": Y}, r"loss_fn=None, .*\(Tensor\) contains no scalar loss; pass loss_fn="),
        ({}, {}, r"target=None, .*pass target="),
    ],
)
def test_what_is_refused_in_a_step(options: dict[str, Any], given: dict[str, Any], words: str) -> None:
    with made(**options) as pipe, pytest.raises(ArgumentError, match=words):
        pipe.step(X, **given)


def test_what_a_result_does_not_have_is_said() -> None:
    with made(loss_fn=None) as pipe:
        result = pipe.evaluate(X, outputs=True)
        assert len(result.outputs) == 2
        with pytest.raises(ArgumentError, match=r"result.loss: there is no loss"):
            _ = result.loss
    with made() as pipe, pytest.raises(ArgumentError, match=r"result.outputs: not kept here; pass outputs=True"):
        _ = pipe.step(X, target=Y).outputs


def test_printed_it_shows_its_stages() -> None:
    with made(cuts=["2"]) as pipe:
        first, *stages = str(pipe).splitlines()
    assert first == "Pipeline of Sequential: 1f1b, 2 ranks, 2 microbatches, unverified"
    assert stages == ["  stage 0 on rank 0: from the start", "  stage 1 on rank 1: from 2"]
    with made(schedule="chimera", cuts=["2"]) as pipe:
        assert "stage 1 on rank 1 and rank 0: from 2" in str(pipe)


def test_bad_closed_pipeline() -> None:
    model = nn.Sequential(*mlp(), nn.Dropout(0.5))
    with made(model=model, microbatches=3) as pipe:
        pipe.step(X, target=Y)
        assert model[-1]._forward_pre_hooks
    assert not model[-1]._forward_pre_hooks
    for call in (pipe.step, pipe.evaluate):
        with pytest.raises(RuntimeError, match="this pipeline was closed; make a new one"):
            call(X, target=Y)
    pipe.close()


def test_bad_names_of_model_arguments() -> None:
    class Named(OneLayer):
        def forward(self, x: Tensor, target: Tensor) -> Tensor:
            return self.layer(x) + target

    with pytest.raises(ArgumentError, match=r"kwargs: .*'target'.*Pipeline.step.*by position"):
        pipeline(Named(WIDTH), (X,), {"target": Y}, loss_fn=squared_error)


def test_bad_inputs_of_a_step() -> None:
    with made(microbatches=3) as pipe:
        with pytest.raises(TypeError, match="takes 2 positional arguments but 3 were given") as caught:
            pipe.step(X, X, target=Y)  # as the model itself says
        assert (
            "recorded for a batch of 11 rows in 3 microbatches; the first got args[0] [4, 9], args[1] [4, 9]"
            in caught.value.__notes__[0]
        )
        assert not any("target=" in note for note in caught.value.__notes__)
        with pytest.raises(TypeError) as caught:
            pipe.step(X, Y)
        assert "target=None: pass what the loss takes as target=..." in caught.value.__notes__[-1]
        assert not any("batch_dims" in note for note in caught.value.__notes__), "it fails however it is cut"
        with pytest.raises(ShapeError, match=r"target requires a gradient.*detach"):
            pipe.step(X, target=Y.clone().requires_grad_())
        with pytest.raises(ShapeError, match="disagree on the number of rows"):
            pipeline(nn.Bilinear(WIDTH, WIDTH, 2), (X, X[:4]), loss_fn=squared_error)


# -- results, and what cannot be copied --------------------------------------------------------------------------------


def test_printing_shows_the_loss() -> None:
    x, y = batch(5)
    with penstock.pipeline(mlp(), (x,), ranks=2, microbatches=2, loss=squared_error) as pipe:
        result = pipe.step(x, target=y)
        assert repr(result) == f"StepResult(loss={float(result.loss):.6g}, sizes=(3, 2))"
        assert repr(StepResult(sizes=(3, 2))) == "StepResult(loss=none here, sizes=(3, 2))"
        with pytest.raises(TypeError, match=r"no tuple: read result\.loss"):
            _loss, _outputs = result


def test_printing_waits_for_nobody() -> None:
    loss = SharedLoss([torch.tensor(1.5)])
    loss.waits.append(lambda: pytest.fail("waited"))
    assert repr(StepResult(_loss=loss)) == "StepResult(loss=under way, sizes=())"
    loss.waits.clear()
    assert repr(StepResult(_loss=loss)) == "StepResult(loss=1.5, sizes=())"


WAYS: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "torch.save": lambda value: torch.save(value, io.BytesIO()),
}


@pytest.mark.parametrize("way", WAYS)
def test_an_object_that_holds_a_pipeline_names_what_can_be_copied(way: str) -> None:
    holder = nn.Module()
    holder.pipe = penstock.pipeline(mlp(), batch()[:1], loss_fn=nn.functional.mse_loss, ranks=2, microbatches=2)
    with holder.pipe, pytest.raises(penstock.ArgumentError, match=r"cannot be copied or pickled.*AveragedModel"):
        WAYS[way](holder)
