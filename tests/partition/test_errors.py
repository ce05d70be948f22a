"""What cannot be kept equal is refused, by name and with a remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import demo, inspect, verify
from penstock._base import compat, pytree
from penstock._base.errors import ArgumentError, PartitionError
from penstock.partition import NoStreams, Partition, Partitioner, user_code
from penstock.partition.record import recorder
from scaffolding.models import gpt, mlp, skips


class Layers(nn.Module):
    """Linear layers with a method of the test's own between them."""

    def __init__(self, between, count: int = 4) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(count))
        self.register_buffer("offset", torch.ones(3))
        self.steps = 0
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.between(self, index, layer(x))
        return x


def partition(model: nn.Module, stages: int = 2, **options) -> Partition:  # type: ignore[no-untyped-def]
    return Partitioner(model, stages, streams=NoStreams(), **options)((torch.randn(2, 3),))


def assert_refused(between, match: str, **options) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PartitionError, match=match):
        partition(Layers(between), **options)


def test_a_branch_on_values_names_the_line_and_the_remedy() -> None:
    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x  # the line

    line = r"test_errors\.py:\d+: `return x if x.sum\(\) > 0 else -x  # the line`"
    assert_refused(between, line + r" in the model's own forward.*Do it outside of the model")

    class Inside(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x  # within

    model = Layers(lambda self, index, x: self.inner(x))
    model.inner = Inside()
    with pytest.raises(PartitionError, match=r"# within` in module 'inner'.*leaf_modules=\["):
        partition(model)


@pytest.mark.parametrize(
    "file", [str(Path(torch.__file__).parents[1] / "torch_things" / "model.py"), "<stdin>", "/tmp/ipykernel_7/42.py"]
)
def test_code_of_any_origin_has_lines(file: str) -> None:
    """Of a package whose name begins with torch's, of standard input, of a notebook."""
    code: dict[str, Any] = {}
    exec(compile("def read(x):\n    return x if x.sum() > 0 else -x", file, "exec"), code)
    assert_refused(lambda self, index, x: code["read"](x), rf"depends on the values of a tensor at .*{file[-20:]}:2")


def test_torchs_own_code_has_lines_if_the_user_has_none() -> None:
    class Checks(nn.Sequential):
        pass

    with pytest.raises(RuntimeError) as raised:
        Checks(nn.Linear(4, 4))(torch.randn(3))
    raised.value.__traceback__ = raised.value.__traceback__ and raised.value.__traceback__.tb_next
    assert "torch/nn/modules/linear.py" in user_code.raising_line(raised.value)
    assert all(user_code.is_ours(str(module.__file__)) for module in (compat, pytree, recorder))
    assert not user_code.is_ours(str(demo.__file__))


@pytest.mark.parametrize("read", ["item", "tolist", "nonzero", "__array__"])
def test_reading_values_is_refused(read: str) -> None:
    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        with torch.no_grad():
            getattr(x.detach().sum() if read == "item" else x.detach(), read)()
        return x

    assert_refused(between, r"depends on the values of a tensor at .*test_errors.py")


@pytest.mark.parametrize(
    ("action", "match"),
    [
        (lambda x: (x + 1, x.register_hook(lambda g: g)), "registers a hook on an activation"),
        (lambda x: x.sum().backward(), "runs a backward"),
        (lambda x: x.detach().requires_grad_().requires_grad_(False), "changes whether an activation takes a gradient"),
        (lambda x: setattr(x, "data", x * 2), r"assigns to `\.data`"),
        (lambda x: x.retain_grad(), "retains the gradient"),
    ],
)
def test_what_cannot_be_replayed_is_refused(action, match: str) -> None:  # type: ignore[no-untyped-def]
    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        action(x)
        return x

    assert_refused(between, match)


def test_a_replaced_buffer_is_refused() -> None:
    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        self.offset = self.offset * 0.9
        return x + self.offset

    assert_refused(between, r"replaces 'offset'.*self.offset.copy_")


def test_an_empty_buffer_may_be_filled() -> None:
    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        self.last = x.detach().mean(0)
        return x

    model = Layers(between)
    model.register_buffer("last", None)
    assert len(partition(model).stages) == 2


def test_batch_norm_shared_between_stages_is_refused() -> None:
    norm = nn.BatchNorm1d(3)

    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        return self.norm(x)

    model = Layers(between)
    model.norm = norm
    with pytest.raises(PartitionError, match=r"norm\.\w+' is updated in place by block 'norm'"):
        partition(model, cuts=["layers.2"])
    partition(model.eval(), cuts=["layers.2"])  # nothing is updated


def test_a_cut_between_a_view_and_its_update_is_refused() -> None:
    def between(self: Layers, index: int, x: Tensor) -> Tensor:
        if index == 0:
            self.kept = x, x[:, :2]
        if index == 3:
            self.kept[1].add_(1)
            return x + self.kept[0]
        return x

    assert_refused(between, r"updates in place memory that .* shares, but a cut separates", cuts=["layers.1"])
    assert len(partition(Layers(between, count=4), 1).stages) == 1  # without a cut it is fine


def test_a_stray_tensor_with_a_gradient_is_refused() -> None:
    weight = torch.randn(3, requires_grad=True)
    assert_refused(lambda self, index, x: x * weight, r"no parameter.*nn\.Parameter")


def test_an_input_that_hides_tensors_is_refused() -> None:
    with pytest.raises(PartitionError, match=r"input args\[0\] is a generator, which holds tensors"):
        Partitioner(mlp().model, 1, streams=NoStreams())(((x for x in [torch.randn(2, 7)]),))


def test_a_block_that_fails_for_real_too_is_named() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(4, 4))
    with pytest.raises(PartitionError, match=r"'1' fails on inputs like the given ones: RuntimeError") as refused:
        partition(model)
    assert str(refused.value).count("RuntimeError") == 1


# -- cuts -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cuts", "match"),
    [
        (["nope"], r"no module named 'nope'; it begins with '"),
        (["h.11"], r"no module named 'h\.11'; the nearest is 'h\.1'"),
        (["wte"], r"stage 0 \(from the beginning to 'wte'\) would run nothing of its own"),
        (["h.2", "h.1"], r"'h\.1' runs before 'h\.2'"),
        (["h.2", "h.2"], "both begin at the same call"),
        (["h", "h.0"], "both begin at the same call"),
        (["unused"], "'unused' never runs"),
    ],
)
def test_cuts_that_make_no_stages(cuts: list[str], match: str) -> None:
    case = gpt()
    case.model.unused = nn.Linear(2, 2)
    with pytest.raises(PartitionError, match=match):
        Partitioner(case.model, len(cuts) + 1, cuts, streams=NoStreams())(case.args)


@pytest.mark.parametrize("cut", ["h.2.norm2", "h"])
def test_names_within_blocks_and_of_lists(cut: str) -> None:
    case = gpt()
    assert Partitioner(case.model, 2, [cut], streams=NoStreams())(case.args).cuts == (cut,)


def test_numbers_of_stages() -> None:
    with pytest.raises(ArgumentError, match=r"2 cuts for 2 stages: name the first module of each .* first, 1 name"):
        Partitioner(gpt().model, 2, ["h.1", "h.2"], streams=NoStreams())
    with pytest.raises(ArgumentError, match="stages=0"):
        Partitioner(gpt().model, 0, streams=NoStreams())
    with pytest.raises(ArgumentError, match="balance='size'"):
        Partitioner(gpt().model, 1, streams=NoStreams(), balance="size")
    case = skips()
    with pytest.raises(PartitionError, match="only 6 layers"):
        Partitioner(case.model, 7, streams=NoStreams())(case.args)
    with pytest.raises(PartitionError, match="only 4 repeated blocks"):
        Partitioner(gpt().model, 5, streams=NoStreams(), balance="layers")(gpt().args)


def test_models_must_be_modules() -> None:
    for model in ([], 3, [nn.Linear(1, 1), "x"]):
        with pytest.raises(ArgumentError, match="expected a module or a list of modules"):
            Partitioner(model, 1, streams=NoStreams())


# -- inputs -----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_torchscript_is_refused_by_name() -> None:
    layer, x = torch.jit.script(nn.Linear(6, 6)), torch.randn(4, 6)
    model = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(PartitionError, match="'1' is a module of TorchScript"):
        inspect(model, (x,), stages=2)
    with pytest.raises(PartitionError, match="'1' is a module of TorchScript"):
        verify(model, (x,), target=None, loss_fn=lambda output: output.mean(), ranks=2, microbatches=2)


def test_lazy_modules_are_refused_until_they_have_shapes() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))

    model, x = make(), torch.randn(4, 4)
    words = r"'1\.weight' has no shape yet, since its module is lazy"
    with pytest.raises(PartitionError, match=words):
        inspect(model, (x,))
    for given in (model, make):
        with pytest.raises(PartitionError, match=words):
            verify(given, (x,), target=x, loss_fn=nn.functional.mse_loss)
    model(x)
    assert len(inspect(model, (x,)).stages) == 2


def test_data_assigned_in_the_models_own_forward_is_refused_with_the_way_that_works() -> None:
    class Momentum(nn.Module):
        in_place = False

        def __init__(self) -> None:
            super().__init__()
            self.online, self.target = nn.Linear(4, 4), nn.Linear(4, 4).requires_grad_(requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            new = self.target.weight.data * 0.9 + self.online.weight.data * 0.1
            if self.in_place:
                self.target.weight.data.copy_(new)
            else:
                self.target.weight.data = new
            return self.online(x) + self.target(x)

    model, x = Momentum(), torch.randn(4, 4)
    with pytest.raises(PartitionError, match=r"assigns to `.data` of 'target.weight'.* place: .data.copy_\(\.\.\.\)"):
        inspect(model, (x,), stages=1)
    model.in_place = True
    assert len(inspect(model, (x,), stages=1).stages) == 1
