"""What was wrapped is what is named: in state dicts, checkpoints, exports, units and cuts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from penstock import PartitionError, Pipeline, checkpoint, inspect, pipeline
from penstock.pipe.run_info import module_names
from scaffolding.models import squared_error
from scaffolding.small import WIDTH, batch

pytestmark = pytest.mark.filterwarnings("default")  # torch.compile's own

X, Y = batch()
NAMES = [f"{block}.0.{kind}" for block in range(4) for kind in ("weight", "bias")]


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def in_blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*map(wrap, plain()))


def made(model: nn.Module | list[nn.Module], cuts: list[str] | None = None, **options: object) -> Pipeline:
    return pipeline(model, (X,), loss_fn=squared_error, ranks=2, microbatches=2, cuts=cuts, balance="flops", **options)


WRAPPED: dict[str, Callable[[], nn.Module | list[nn.Module]]] = {
    "compiled": lambda: compiled(plain()),
    "compiled blocks": lambda: in_blocks(compiled),
    "compiled layers": lambda: [compiled(block) for block in plain()],
    "checkpointed blocks": lambda: in_blocks(checkpoint_wrapper),
    "data-parallel": lambda: nn.DataParallel(plain()),
    "data-parallel and compiled": lambda: nn.DataParallel(compiled(plain())),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_what_was_wrapped_is_what_is_named(kind: str, tmp_path: Path) -> None:
    with made(WRAPPED[kind](), ["2"]) as pipe, made(plain(), ["2"]) as other:
        assert pipe.step(X, target=Y).loss == other.step(X, target=Y).loss
        assert pipe.cuts == ("2",)
        assert list(pipe.state_dict()) == [name for name, _ in pipe.named_parameters()] == NAMES
        assert all(torch.equal(g.grad, p.grad) for g, p in zip(pipe.parameters(), other.parameters(), strict=True))
        assert not [name for stage in pipe.session.partition.stages for name in module_names(stage) if "_" in name]
        with torch.no_grad():
            next(iter(pipe.parameters())).add_(1)
        checkpoint.save(tmp_path / "saved", pipe)
        checkpoint.export_safetensors(tmp_path / "model.safetensors", pipe)
        with safe_open(tmp_path / "model.safetensors", "pt") as file:
            assert sorted(file.keys()) == sorted(NAMES)
            assert file.metadata() == {"format": "pt"}
        checkpoint.load(tmp_path / "saved", other)
        assert_alike(pipe, other)
        checkpoint.load(tmp_path / "saved", pipe)
        other.load_state_dict(plain().state_dict())
        pipe.load_state_dict(other.state_dict())
        assert_alike(pipe, other)
        checkpoint.import_safetensors(tmp_path / "model.safetensors", pipe)
        with torch.device("meta"):
            empty = WRAPPED[kind]()
        with made(empty, materialize=checkpoint.init_from_weights(tmp_path / "model.safetensors", empty)) as third:
            assert_alike(pipe, third)


def assert_alike(one: Pipeline, other: Pipeline) -> None:
    for (name, mine), (same, theirs) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(mine, theirs), name


def test_a_state_with_the_names_of_a_wrapped_model_is_read() -> None:
    state = compiled(plain()).state_dict()
    assert all(name.startswith("_orig_mod.") for name in state)
    with made(plain()) as pipe:
        pipe.load_state_dict({f"module.{name}": 0 * value for name, value in plain().state_dict().items()})
        assert not any(value.any() for value in pipe.state_dict().values())
        pipe.load_state_dict(state)
        assert torch.equal(pipe.state_dict()["2.0.weight"], plain()[2][0].weight)


def test_chosen_cuts_have_no_wrapper_in_their_names() -> None:
    assert made(compiled(plain())).cuts == made(plain()).cuts == ("2.0",)
    assert made(in_blocks(compiled)).cuts == ("2",)


@pytest.mark.parametrize(
    ("kind", "given", "known"),
    [
        ("compiled", "_orig_mod.2", "2"),
        ("compiled", "_orig_mod.2.0:1", "2.0:1"),
        ("compiled", "module._orig_mod.2", "2"),
        ("compiled blocks", "2._orig_mod", "2"),
        ("compiled blocks", "2._orig_mod:1", "2:1"),
        ("checkpointed blocks", "2._checkpoint_wrapped_module.0", "2.0"),
        ("data-parallel", "module.2", "2"),
        ("data-parallel and compiled", "module._orig_mod.2.0", "2.0"),
    ],
)
def test_names_with_the_wrapper_are_known_too_and_come_back_without(kind: str, given: str, known: str) -> None:
    with made(WRAPPED[kind](), [given]) as pipe:
        assert pipe.step(X, target=Y).loss > 0
        assert pipe.cuts == (known,)
    assert (
        inspect(WRAPPED[kind](), (X,), stages=2, cuts=[given], loss_fn=lambda out: out.mean()).stages[1].first_module
        == known
    )
    with pytest.raises(PartitionError, match="no module named '7'"):
        made(WRAPPED[kind](), ["_orig_mod.7"])


def test_a_child_called_module_is_no_wrapper() -> None:
    model = nn.Sequential(OrderedDict(module=plain(), last=nn.Linear(WIDTH, WIDTH)))
    with made(model, ["module.2"]) as pipe:
        assert pipe.cuts == ("module.2",)
        pipe.load_state_dict(model.state_dict())


def test_the_state_of_layers_goes_back_under_their_own_names() -> None:
    layers: list[nn.Module] = [nn.Sequential(OrderedDict([(name, nn.Linear(WIDTH, WIDTH))])) for name in ("up", "down")]
    with made(layers) as pipe:
        state = {name: torch.ones_like(tensor) for name, tensor in pipe.state_dict().items()}
        assert list(state) == ["up.weight", "up.bias", "down.weight", "down.bias"]
        pipe.load_state_dict(state)
    assert all(parameter.eq(1).all() for layer in layers for parameter in layer.parameters())
