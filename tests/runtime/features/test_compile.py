"""Compiled stages: by backends that keep the bits all is equal; what cannot be split or kept is said."""

from __future__ import annotations

import copy
import itertools
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import penstock
from penstock._base.errors import ArgumentError
from penstock.runtime.features.compiled import compile_notes
from scaffolding.by_hand import assert_steps_by_hand
from scaffolding.models import CASES, Case, Forward, Layers, gpt
from scaffolding.proofs import after_each_step, proven
from scaffolding.small import batch, mlp

# torch's compiler hides this warning of its own, but not from a filter that makes errors of warnings.
pytestmark = pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf")

SAME_BITS = {"backend": "aot_eager"}


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    torch.compiler.reset()


class Counting:
    """A backend that runs graphs as they are, and counts them."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


@pytest.mark.parametrize(("draws", "schedule"), [(False, "1f1b"), (True, "1f1b"), (False, "zb-h1")])
def test_stages_are_compiled_once_for_all_microbatches_and_steps(draws: bool, schedule: str) -> None:
    x, y = batch(8)
    backend = Counting()
    model = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(9, 9), nn.Dropout(0.3 * draws))))
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "schedule": schedule, "compile": {"backend": backend}}
    with penstock.pipeline(model, (x,), loss=F.mse_loss, **options) as pipe:
        pipe.step(x, target=y)
        trained = backend.graphs
        for _ in range(12):
            pipe.step(x, target=y)
        assert backend.graphs == trained
        assert draws or trained == 2
        pipe.evaluate(x, target=y)
        evaluated = backend.graphs
        pipe.evaluate(x, target=y)
        assert backend.graphs == evaluated
        assert draws or evaluated == 4


class Sliced(nn.Module):
    """Two parameters, of which one's gradient is a slice of the other's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.all = nn.Parameter(torch.randn(1, 1, 9)), nn.Parameter(torch.randn(1, 3, 9))
        self.embed, self.head = nn.Linear(9, 9), nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x.unflatten(1, (1, 9)).expand(-1, 2, -1)], 1)
        return self.head(x + self.all).sum(1)


class Half(Layers):
    """Enters and leaves autocast in its forward."""

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=index % 2 == 0):
                x = layer(x).float()
        return x


def on_batch(model: nn.Module, rows: int = 8) -> Case:
    return Case(model, batch(rows)[:1], {}, batch(rows)[1], F.mse_loss)


@pytest.mark.parametrize(
    ("make", "around", "options"),
    [
        (CASES["in_place"], False, {}),
        (lambda: on_batch(Sliced(), 4), False, {"microbatches": 4, "ranks": 1, "schedule": "zb-h1"}),  # a row each
        (lambda: on_batch(Half(9, 2)), False, {}),
        (lambda: on_batch(mlp()), True, {}),
        pytest.param(CASES["convnet"], False, {"schedule": "zb-h1"}, marks=pytest.mark.long),
        pytest.param(lambda: gpt(0.2), False, {"schedule": "zb-h1"}, marks=pytest.mark.long),
    ],
)
def test_compiled_stages_give_the_bits_of_one_device(
    make: Callable[[], Case], around: bool, options: dict[str, Any]
) -> None:
    """Also where gradients share memory, and within or around autocast."""
    torch.manual_seed(0)
    case, given = make(), {"ranks": 2, "microbatches": 2, "compile": SAME_BITS, "exact": True, **options}
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=around):
        proven(case.model, *case.args, case.target, case.loss, **given)
    assert not torch.is_autocast_enabled("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(9, 9), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.linear(x)).tanh()


def test_a_model_with_compiled_blocks_runs_unedited() -> None:
    """Also where a call has compiled them without the hooks that set streams: they draw the pipeline's masks."""
    torch.manual_seed(0)
    model, (x, y) = nn.Sequential(Block(), Block()), batch(8)
    for block in model:
        block.compile(**SAME_BITS)
    model(x)
    proven(model, x, y, ranks=2, microbatches=4, schedule="zb-h1", exact=True)


def ways_to_compile() -> dict[str, Callable[[nn.Sequential, Any], nn.Module]]:
    """How users compile a model: as a whole or block by block, in place or wrapped, or its forward."""

    def in_place(model: nn.Sequential, backend: Any) -> nn.Module:
        model.compile(backend=backend)
        return model

    def forward(model: nn.Sequential, backend: Any) -> nn.Module:
        model.forward = torch.compile(model.forward, backend=backend)  # type: ignore[method-assign]
        return model

    def each(model: nn.Sequential, backend: Any) -> nn.Module:
        for block in model:
            block.compile(backend=backend)
        return model

    return {
        "torch.compile(model)": lambda model, backend: torch.compile(model, backend=backend),
        "model.compile()": in_place,
        "model.forward = torch.compile()": forward,
        "block.compile()": each,
        "torch.compile(block)": lambda model, backend: nn.Sequential(
            *(torch.compile(b, backend=backend) for b in model)
        ),
        "block.forward = torch.compile()": lambda model, backend: nn.Sequential(*(forward(b, backend) for b in model)),
    }


@pytest.mark.parametrize(
    ("way", "schedule"), [*zip(ways_to_compile(), itertools.cycle(["1f1b", "zb-h1"]), strict=False)]
)
def test_what_the_model_compiles_runs_compiled_in_the_pipeline_and_outside(way: str, schedule: str) -> None:
    x, y = batch(8)
    plain, backend = Counting(), Counting()
    blocks = [nn.Sequential(nn.Linear(9, 9), nn.Tanh(), nn.Linear(9, 9)) for _ in range(4)]
    ways_to_compile()[way](nn.Sequential(*copy.deepcopy(blocks)), plain)(x).sum().backward()
    torch.compiler.reset()
    model = ways_to_compile()[way](nn.Sequential(*blocks), backend)
    with penstock.pipeline(model, (x,), ranks=2, microbatches=4, loss=F.mse_loss, schedule=schedule) as pipe:
        pipe.step(x, target=y)
        once = backend.graphs
        assert once == max(plain.graphs, 2)  # at least one a stage
        pipe.step(x, target=y)
        assert backend.graphs == once
        if schedule == "zb-h1":
            assert pipe.deferred_weight_grad_fraction == {0: 0.9, 1: 0.9}
        assert any("close, not equal" in note for note in pipe.notes)
    before = backend.calls
    model(x)
    assert backend.calls == before + plain.calls


def test_functions_that_a_model_compiles_run_compiled() -> None:
    x, y = batch(8)
    backend = Counting()
    gate = torch.compile(lambda one, other: one.sigmoid() * other, backend=backend)

    class Gated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return gate(super().forward(x), x)

    with penstock.pipeline(
        nn.Sequential(Gated(9, 9), Gated(9, 9)), (x,), ranks=2, microbatches=4, loss=F.mse_loss
    ) as p:
        p.step(x, target=y)
    assert (backend.graphs, backend.calls) == (2, 8)


def test_a_stage_whose_compiled_weights_cannot_wait_says_so() -> None:
    x, y = batch(8)
    blocks = [Forward(lambda self, x: (x * self.scale).tanh(), scale=nn.Parameter(torch.ones(1, 9))) for _ in range(4)]
    for block in blocks:
        block.compile(backend="eager")
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "loss": F.mse_loss, "schedule": "zb-h1"}
    with penstock.pipeline(nn.Sequential(*blocks), (x,), **options) as pipe:
        assert not any("deferred_weight_grad_fraction" in note for note in pipe.notes)
        pipe.step(x, target=y)
        assert pipe.deferred_weight_grad_fraction == {0: 0.0, 1: 0.0}
        assert [note.split(":")[0] for note in pipe.notes if "deferred_weight_grad_fraction is 0" in note] == [
            "stage 0",
            "stage 1",
        ]


@pytest.mark.parametrize(
    ("compile", "says"),
    [
        ("inductor", r"compile='inductor': expected True, False, or a dict"),
        ({"mode": "reduce-overhead"}, "CUDA graphs"),
        ({"mode": "max-autotune"}, "max-autotune-no-cudagraphs"),
        ({"options": {"triton.cudagraphs": True}}, "CUDA graphs"),
        ({"backend": "cudagraphs"}, "CUDA graphs"),
        ({"disable": True}, "leave compile= out"),
    ],
)
def test_what_cannot_be_compiled_is_refused(compile: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        penstock.pipeline(mlp(), batch(8)[:1], loss=F.mse_loss, ranks=2, compile=compile)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("how", [{"mode": "reduce-overhead"}, {"backend": "cudagraphs"}])
def test_a_models_own_cuda_graphs_are_refused_as_its_own(how: dict[str, str]) -> None:
    whole, blocks = mlp(), mlp()
    blocks[0].compile(**how)
    for model, whose in ((torch.compile(whole, **how), "of the model"), (blocks, "of a block, Linear,")):
        with pytest.raises(ArgumentError, match=rf"^torch.compile\(...\) {whose} uses CUDA graphs"):
            penstock.pipeline(model, batch(8)[:1], loss=F.mse_loss, ranks=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("compile", "expected"), [(True, False), (SAME_BITS, False), ({"mode": "max-autotune-no-cudagraphs"}, True)]
)
def test_masks_of_the_compilers_own_are_told(compile: Any, expected: bool) -> None:
    for draws in (True, False):
        notes = compile_notes(compile, draws=draws)
        assert any("of the compiler's own" in note for note in notes) is (expected and draws)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # importing inductor uses what torch deprecates
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_inductor_is_close_draws_the_same_masks_and_leaves_most_to_w(monkeypatch: pytest.MonkeyPatch) -> None:
    shares, case = list[dict[int, float]](), gpt(0.2)
    after_each_step(monkeypatch, lambda pipe: shares.append(pipe.deferred_weight_grad_fraction))
    options = {"microbatches": 2, "ranks": 2, "schedule": "zb-h1", "compile": True}
    report = penstock.verify(case.model, case.args, target=case.target, loss_fn=case.loss, **options).raise_if_failed()
    assert not report.exact  # other masks would differ by far more than rounding
    assert all(row.max_difference <= 1e-4 * row.max_reference for row in report.rows if row.verdict == "close")
    assert any(len(share) == 2 and min(share.values()) > 0.8 for share in shares), shares


# -- what a forward keeps for its backward, beside compiled code -------------------------------------------------------


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.BatchNorm1d(9)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def test_averages_that_a_checkpoint_would_update_once_more_are_refused() -> None:
    x, _ = batch(8)
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "ranks": 2, "microbatches": 2}
    with pytest.raises(penstock.PartitionError, match=r"compile=: stage 0 updates buffer 'blocks\.0\.1\.running_mean'"):
        penstock.pipeline(Checkpoints(), (x,), compile=SAME_BITS, **options)


def test_hooks_that_come_and_go_between_steps_have_their_effect() -> None:
    models, data = (mlp(), mlp()), [batch(6)]
    options: dict[str, Any] = {"ranks": 2, "microbatches": 3, "schedule": "zb-h1", "compile": SAME_BITS}
    with penstock.pipeline(models[0], data[0][:1], loss=F.mse_loss, **options) as pipe:
        assert_steps_by_hand(pipe, models[1], data, F.mse_loss, 3)
        tripled = [model[0].register_forward_hook(lambda module, args, result: result * 3) for model in models]
        for model in models:
            model[4].register_full_backward_hook(lambda module, into, out: (into[0] * 0.5,))
        assert_steps_by_hand(pipe, models[1], data, F.mse_loss, 3)
        for hook in tripled:
            hook.remove()
        assert_steps_by_hand(pipe, models[1], data, F.mse_loss, 3)
