"""What checkpoints and files of weights bring back, and what is refused, in one process, where it costs little."""

from __future__ import annotations

import json
import struct
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import penstock
from penstock import ArgumentError, CheckpointError, PartitionError, Pipeline, checkpoint, inspect, pipeline
from penstock.checkpoint.export import FileEntry, order_entries, write_file
from penstock.pipe.run_info import module_names
from scaffolding.models import squared_error
from scaffolding.small import WIDTH, batch


def made(seed: int, ranks: int = 2, dropout: float = 0.4) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(WIDTH, WIDTH), nn.Dropout(dropout))))
    return penstock.pipeline(model, batch()[:1], loss=squared_error, ranks=ranks, microbatches=3, seed=seed)


def losses(pipe: penstock.Pipeline, steps: int) -> list[float]:
    x, y = batch()
    return [float(pipe.step(x, target=y).loss) for _ in range(steps)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_masks_go_on_as_they_were_in_a_pipeline_of_another_seed(tmp_path: Path, ranks: int) -> None:
    with made(seed=3) as pipe:
        losses(pipe, 2)
        checkpoint.save(tmp_path, pipe)
        expected = losses(pipe, 2)
    with made(seed=8, ranks=ranks) as other:
        restored = checkpoint.load(tmp_path, other)
        assert restored is not None
        assert (other.seed, other.step_count, restored.step) == (3, 2, 2)
        assert losses(other, 2) == expected
    assert expected[0] != expected[1]


def test_the_order_of_torch_save_is_answered_with_the_right_one(tmp_path: Path) -> None:
    with made(seed=0) as pipe:
        for act in (checkpoint.save, checkpoint.load):
            with pytest.raises(ArgumentError, match=r"expected a Pipeline, not a .*Path; save and load take"):
                act(pipe, tmp_path)  # type: ignore[operator]


def test_a_write_in_the_background_ends_where_it_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with made(seed=0) as pipe:
        path = checkpoint.save("checkpoints", pipe, blocking=False)
        monkeypatch.chdir("elsewhere")
        checkpoint.wait_for_save(pipe)
        assert path == checkpoint.latest(tmp_path / "checkpoints")


def of(dtype: torch.dtype) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2)))
    return penstock.pipeline(model, (batch()[0].to(dtype),), loss=lambda y: y.mean(), ranks=2, microbatches=2)


@pytest.mark.parametrize(("saved", "loaded"), [(torch.float64, torch.bfloat16), (torch.bfloat16, torch.float32)])
def test_a_checkpoint_of_another_dtype_is_refused(tmp_path: Path, saved: torch.dtype, loaded: torch.dtype) -> None:
    """A cast would lose digits of parameters and moments, and training would not go on as it would have."""
    with of(saved) as pipe:
        checkpoint.save(tmp_path, pipe)
        weights = dict(pipe.named_parameters())
    with of(loaded) as other:
        mine = {name: parameter.detach().fill_(7) for name, parameter in other.named_parameters()}
        dtypes = f"in {saved}, and here it is in {loaded}; make the model in the dtype in which it was saved"
        with pytest.raises(ArgumentError, match=f"0.weight {dtypes}; `import_safetensors` takes"):
            checkpoint.load(tmp_path, other)
        assert all((one == 7).all() for one in mine.values()), "nothing was changed"
        checkpoint.import_safetensors(tmp_path, other)
        assert all(torch.equal(one, weights[name].to(loaded)) for name, one in mine.items())


class Sums(torch.optim.Optimizer):
    """Keeps float32 beside weights in bfloat16."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = torch.full(parameter.shape, 1 / 3)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Torch's own casts to the parameter's dtype."""
        for number, state in state_dict["state"].items():
            self.state[self.param_groups[0]["params"][number]] = state


def test_an_optimizers_state_keeps_its_own_precision(tmp_path: Path) -> None:
    with of(torch.bfloat16) as pipe:
        optimizer = Sums(pipe.parameters())
        optimizer.step()
        checkpoint.save(tmp_path, pipe, optimizer)
    with of(torch.bfloat16) as other:
        loaded = Sums(other.parameters())
        checkpoint.load(tmp_path, other, loaded)
        assert all(torch.equal(loaded.state[p]["sum"], torch.full(p.shape, 1 / 3)) for p in other.parameters())


# -- files of weights -------------------------------------------------------------------------------------------------


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize(
    ("without", "more", "words"),
    [
        ("1.bias", "", r"does not fit the model \(missing: 1\.bias; unknown to the model: none\)"),
        ("", "2.weight", r"does not fit the model \(missing: none; unknown to the model: 2\.weight\)"),
    ],
)
def test_a_file_of_another_model_is_refused_unless_one_says_otherwise(
    tmp_path: Path, without: str, more: str, words: str
) -> None:
    state = {name: torch.full_like(tensor, 0.5) for name, tensor in model().state_dict().items() if name != without}
    save_file({**state, **({more: torch.zeros(2)} if more else {})}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = model()
    with pytest.raises(ArgumentError, match=words):
        checkpoint.init_from_weights(tmp_path, empty)
    checkpoint.init_from_weights(tmp_path, empty, strict=False)
    with penstock.pipeline(model(), batch()[:1], loss=squared_error, ranks=2, microbatches=2) as pipe:
        before = {name: tensor.clone() for name, tensor in pipe.state_dict().items()}
        with pytest.raises(ArgumentError, match=words):
            checkpoint.import_safetensors(tmp_path, pipe)
        assert all(torch.equal(tensor, before[name]) for name, tensor in pipe.state_dict().items())
        checkpoint.import_safetensors(tmp_path, pipe, strict=False)
        for name, tensor in pipe.state_dict().items():
            assert torch.equal(tensor, state.get(name, before[name]))


@pytest.mark.parametrize("name", ["a" * n for n in range(1, 9)])
def test_data_begin_at_whole_words_and_large_elements_come_first(tmp_path: Path, name: str) -> None:
    """A reader may map the file and use the tensors where they lie."""
    tensors: dict[str, Tensor] = {
        name: torch.arange(3, dtype=torch.uint8),
        "half": torch.ones(3).half(),
        "double": torch.arange(2.0).double(),
    }
    entries = order_entries([[FileEntry(key, t.dtype, tuple(t.shape)) for key, t in tensors.items()]], list(tensors))
    data = (tensors[entry.name].view(torch.uint8) for entry in entries)
    write_file(tmp_path / "file.safetensors", entries, {}, data)
    raw = (tmp_path / "file.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    assert length % 8 == 0
    header = json.loads(raw[8 : 8 + length])
    for key, tensor in tensors.items():
        assert header[key]["data_offsets"][0] % tensor.element_size() == 0
    assert all(torch.equal(tensors[key], tensor) for key, tensor in load_file(tmp_path / "file.safetensors").items())


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"damaged" * 9)
    damaged = pytest.raises(CheckpointError, match=r"model\.safetensors is not a safetensors file")
    with damaged:
        checkpoint.init_from_weights(tmp_path, model())
    with penstock.pipeline(model(), batch()[:1], loss=squared_error, ranks=2, microbatches=2) as pipe, damaged:
        checkpoint.import_safetensors(tmp_path, pipe)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match="save_file"):
        checkpoint.init_from_weights(tmp_path / "pytorch_model.bin", model())
    index = tmp_path / "model.safetensors.index.json"
    for text, words in (
        ('{"weight_map"', "copy the whole folder"),
        ('{"weight_map": {"w": "a.safetensors"}}', "lacks"),
    ):
        index.write_text(text)
        with pytest.raises(CheckpointError, match=words):
            checkpoint.init_from_weights(tmp_path, model())


# -- names without what wraps models ----------------------------------------------------------------------------------


X, Y = batch()
NAMES = [f"{block}.0.{kind}" for block in range(4) for kind in ("weight", "bias")]


def unwrapped() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def in_blocks(wrap: Callable[[nn.Module], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*map(wrap, unwrapped()))


def wrapped(model: nn.Module | list[nn.Module], cuts: list[str] | None = None, **options: object) -> Pipeline:
    return pipeline(model, (X,), loss_fn=squared_error, ranks=2, microbatches=2, cuts=cuts, balance="flops", **options)


WRAPPED: dict[str, Callable[[], nn.Module | list[nn.Module]]] = {
    "compiled": lambda: compiled(unwrapped()),
    "compiled blocks": lambda: in_blocks(compiled),
    "compiled layers": lambda: [compiled(block) for block in unwrapped()],
    "checkpointed blocks": lambda: in_blocks(checkpoint_wrapper),
    "data-parallel": lambda: nn.DataParallel(unwrapped()),
    "data-parallel and compiled": lambda: nn.DataParallel(compiled(unwrapped())),
}


@pytest.mark.parametrize("kind", WRAPPED)
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_what_was_wrapped_is_what_is_named(kind: str, tmp_path: Path) -> None:
    with wrapped(WRAPPED[kind](), ["2"]) as pipe, wrapped(unwrapped(), ["2"]) as other:
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
        other.load_state_dict(unwrapped().state_dict())
        pipe.load_state_dict(other.state_dict())
        assert_alike(pipe, other)
        checkpoint.import_safetensors(tmp_path / "model.safetensors", pipe)
        with torch.device("meta"):
            empty = WRAPPED[kind]()
        with wrapped(empty, materialize=checkpoint.init_from_weights(tmp_path / "model.safetensors", empty)) as third:
            assert_alike(pipe, third)


def assert_alike(one: Pipeline, other: Pipeline) -> None:
    for (name, mine), (same, theirs) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert name == same
        assert torch.equal(mine, theirs), name


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_a_state_with_the_names_of_a_wrapped_model_is_read() -> None:
    state = compiled(unwrapped()).state_dict()
    assert all(name.startswith("_orig_mod.") for name in state)
    with wrapped(unwrapped()) as pipe:
        pipe.load_state_dict({f"module.{name}": 0 * value for name, value in unwrapped().state_dict().items()})
        assert not any(value.any() for value in pipe.state_dict().values())
        pipe.load_state_dict(state)
        assert torch.equal(pipe.state_dict()["2.0.weight"], unwrapped()[2][0].weight)


@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_chosen_cuts_have_no_wrapper_in_their_names() -> None:
    assert wrapped(compiled(unwrapped())).cuts == wrapped(unwrapped()).cuts == ("2.0",)
    assert wrapped(in_blocks(compiled)).cuts == ("2",)


@pytest.mark.parametrize(
    ("kind", "given", "known"),
    [
        ("compiled", "_orig_mod.2.0:1", "2.0:1"),
        ("compiled blocks", "2._orig_mod:1", "2:1"),
        ("checkpointed blocks", "2._checkpoint_wrapped_module.0", "2.0"),
        ("data-parallel and compiled", "module._orig_mod.2.0", "2.0"),
    ],
)
@pytest.mark.filterwarnings("default")  # torch.compile's own
def test_names_with_the_wrapper_are_known_too_and_come_back_without(kind: str, given: str, known: str) -> None:
    with wrapped(WRAPPED[kind](), [given]) as pipe:
        assert pipe.step(X, target=Y).loss > 0
        assert pipe.cuts == (known,)
    assert (
        inspect(WRAPPED[kind](), (X,), stages=2, cuts=[given], loss_fn=lambda out: out.mean()).stages[1].first_module
        == known
    )
    with pytest.raises(PartitionError, match="no module named '7'"):
        wrapped(WRAPPED[kind](), ["_orig_mod.7"])


def test_a_child_called_module_is_no_wrapper() -> None:
    model = nn.Sequential(OrderedDict(module=unwrapped(), last=nn.Linear(WIDTH, WIDTH)))
    with wrapped(model, ["module.2"]) as pipe:
        assert pipe.cuts == ("module.2",)
        pipe.load_state_dict(model.state_dict())


def test_the_state_of_layers_goes_back_under_their_own_names() -> None:
    layers: list[nn.Module] = [nn.Sequential(OrderedDict([(name, nn.Linear(WIDTH, WIDTH))])) for name in ("up", "down")]
    with wrapped(layers) as pipe:
        state = {name: torch.ones_like(tensor) for name, tensor in pipe.state_dict().items()}
        assert list(state) == ["up.weight", "up.bias", "down.weight", "down.bias"]
        pipe.load_state_dict(state)
    assert all(parameter.eq(1).all() for layer in layers for parameter in layer.parameters())
