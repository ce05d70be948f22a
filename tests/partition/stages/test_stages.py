"""Recording and cutting, one behaviour a test."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from penstock import pipeline
from penstock._base.errors import PartitionError
from penstock.partition import NoStreams, Partition, Partitioner, default_kwargs
from scaffolding.by_hand import assert_steps_by_hand
from scaffolding.models import Forward, convnet, dicts, gpt, llama, mlp, squared_error


def check(model: nn.Module, *args: Tensor, stages: int = 2, **options) -> Partition:  # type: ignore[no-untyped-def]
    """Train a model whose result is a tensor in stages, and unsplit."""
    twin = copy.deepcopy(model)
    with pipeline(model, args, loss_fn=squared_error, ranks=stages, microbatches=1, **options) as pipe:
        target = torch.ones_like(pipe.predict(*args))
        assert_steps_by_hand(pipe, twin, [(*args, target)], squared_error, 1)
        return pipe.session.partition  # type: ignore[return-value]


def layers(count: int = 4, width: int = 3) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(nn.Linear(width, width) for _ in range(count))


def model_of(forward: Callable[..., Any], count: int = 4) -> Forward:
    """Layers, and a forward of the test's own."""
    return Forward(forward, layers=layers(count))


# -- what travels -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [lambda t: (t + 1).item(), lambda t: t.bool().item(), Tensor.tolist, Tensor.numpy])
def test_known_values_that_are_overwritten_are_unknown(read: Callable[[Tensor], Any]) -> None:
    """By what reads one number of a real tensor for its own purposes, too, as fake tensors do."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h, count = self.layers[0](x), torch.zeros(1)
        count += h.detach().gt(0).sum()
        return self.layers[1](h) if read(count) else h

    with pytest.raises(PartitionError, match="depends on the values of a tensor"):
        Partitioner(model_of(forward), 2, streams=NoStreams())((torch.randn(2, 3),), {})


def test_an_update_in_place_may_bring_a_gradient() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        weights = torch.zeros(2, 3)
        y = self.layers[0](x)
        if self.fill:
            weights[:, 0] = y[:, 0]
        y = self.layers[1](y)
        weights[:, 1] = y[:, 1]
        return self.layers[2](weights)

    for fill in (False, True):
        model = model_of(forward, 3)
        model.fill = fill
        made = check(model, torch.randn(2, 3), stages=3, cuts=["layers.1", "layers.2"])
        found = [(i.source, i.meta.requires_grad) for s in made.stages for i in s.meta.inputs if i.name == "zeros"]
        assert found == [(0, fill), (1, True)]


# -- what lives on a stage --------------------------------------------------------------------------------------------


def test_non_persistent_buffers_stay_out_of_the_state() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers(2)
            self.register_buffer("saved", torch.ones(3))
            self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)
            self.table = torch.ones(3)

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](x) * self.scale + self.table) + self.saved

    model = Scaled()
    made = check(model, torch.randn(2, 3))
    state = set().union(*(s.module.state_dict() for s in made.stages))
    assert state == set(model.state_dict())
    assert set(dict(made.stages[0].buffers)) == {"scale"}


def test_names_in_a_list_of_modules() -> None:
    unique = [nn.Sequential(nn.Linear(2, 2)), nn.LayerNorm(2)]
    partitioner = Partitioner(unique, 2, streams=NoStreams())
    made = partitioner((torch.randn(1, 2),))
    assert [s.meta.parameters for s in made.stages] == [("0.weight", "0.bias"), ("weight", "bias")]
    clashing = [nn.Linear(2, 2), nn.Linear(2, 2)]
    made = Partitioner(clashing, 2, streams=NoStreams())((torch.randn(1, 2),))
    assert [s.meta.parameters for s in made.stages] == [("0.weight", "0.bias"), ("1.weight", "1.bias")]


# -- what a recording follows -----------------------------------------------------------------------------------------


def test_values_that_the_program_alone_decides_can_be_branched_on() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        positions = torch.arange(3)
        weights = torch.zeros(2, 3)
        weights[:, 0] = x[:, 0]  # no longer known
        if (positions.diff() == 1).all():
            x = x * positions
        return self.layers[1](self.layers[0](x) + weights)

    made = check(model_of(forward), torch.randn(2, 3))
    assert "diff" not in made.code  # dead after the branch
    assert "* arange" in made.code or "mul" in made.code


def test_operators_of_every_kind() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        x = 1 - self.layers[0](x)
        x = 2 / (x.T.mT * 0.5 + 3)
        x = (2**x) @ torch.eye(3) - x[..., :1].real
        y = -x
        y += abs(x)
        y[:, 1:] = 0.5
        y, z = y.split([1, 2], dim=-1)
        values, _ = torch.cat([y, z], -1).topk(3)
        return self.layers[1](values * (values > 0) + values.max(-1, keepdim=True).values)

    check(model_of(forward), torch.randn(2, 3))


def test_hooks_and_an_override_of_call_stay_inside_the_unit() -> None:
    class Loud(nn.Linear):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x) * 2

    model = model_of(lambda self, x: self.layers[1](self.layers[0](x)))
    model.layers = nn.ModuleList([Loud(3, 3), nn.Linear(3, 3)])
    model.layers[1].register_forward_hook(lambda module, args, output: output.tanh())
    code = check(model, torch.randn(2, 3)).code
    assert "mul" not in code
    assert "tanh" not in code
    assert "__call__" in Loud.__dict__
    assert "__call__" not in nn.Linear.__dict__


# -- modes ------------------------------------------------------------------------------------------------------------


def test_regions_without_gradients_are_kept() -> None:
    case = dicts()
    made = Partitioner(case.model, 1, streams=NoStreams())(case.args, case.kwargs)
    lines = [line.strip() for line in made.code.splitlines() if "grad" in line]
    assert len(lines) == 3  # remember, switch off, put back: once for the whole region


# -- leaving no trace -------------------------------------------------------------------------------------------------


def test_recording_leaves_no_trace() -> None:
    case = convnet()
    model = case.model.train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    attributes = [dict(m.__dict__) for m in model.modules()]
    identities = [id(t) for t in model.state_dict(keep_vars=True).values()]
    generator = torch.get_rng_state()
    calls = {m.__class__: m.__class__.__call__ for m in model.modules()}
    Partitioner(model, 3, streams=NoStreams())(case.args)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert identities == [id(t) for t in model.state_dict(keep_vars=True).values()]
    assert attributes == [dict(m.__dict__) for m in model.modules()]
    assert torch.equal(generator, torch.get_rng_state())
    assert all(cls.__call__ is call for cls, call in calls.items())
    assert all(p.grad is None for p in model.parameters())


def test_a_block_that_runs_for_real_leaves_no_trace() -> None:
    class Writes(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 3)
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            self.weight.data.mul_(0.9)
            return super().forward(x) * (1 + int(x.argmax()))

    model, x = nn.Sequential(Writes(), nn.Linear(3, 3)), torch.randn(2, 3)
    before, generator = copy.deepcopy(model), torch.get_rng_state()
    partition = Partitioner(model, 2, streams=NoStreams())((x,))
    (note,) = partition.notes
    assert note.startswith("0 ran once for real, on made-up inputs")
    assert set(partition.drawing_modules) == partition.may_draw == {"0"}, "it drew none, but may for other values"
    assert torch.equal(generator, torch.get_rng_state())
    assert all(map(torch.equal, model.state_dict().values(), before.state_dict().values()))


def test_a_block_that_runs_for_real_may_return_a_view() -> None:
    narrow = Forward(lambda self, x: x[:, :2] if x.sum() < 1e9 else x)
    check(nn.Sequential(nn.Linear(3, 3), narrow, nn.Linear(2, 3)), torch.randn(2, 3))


def test_a_failed_recording_leaves_no_trace() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.steps = 7
        return x if self.layers[0](x).sum() > 0 else -x

    model = model_of(forward)
    before, weight = dict(model.__dict__), model.layers[0].weight
    with pytest.raises(ValueError, match="depends on the values"):
        Partitioner(model, 1, streams=NoStreams())((torch.ones(2, 3),))
    assert model.__dict__ == before
    assert model.layers[0].weight is weight


def test_attributes_that_a_stage_will_not_set_are_noted() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.hidden = self.layers[0](x)
        self.count = getattr(self, "count", 0) + 1
        return self.layers[1](self.hidden)

    notes = Partitioner(model_of(forward), 2, streams=NoStreams())((torch.ones(2, 3),)).notes
    assert notes == (
        "the forward leaves a tensor in hidden; a stage does not set it",
        "the forward changes count; a stage keeps the value it had when recorded",
        "the forward does not use 'layers.2.weight', 'layers.2.bias', 'layers.3.weight', 'layers.3.bias': on no stage",
    )


# -- signatures -------------------------------------------------------------------------------------------------------


def test_a_signature_is_recorded_once() -> None:
    case = mlp()
    partitioner = Partitioner(case.model, 2, streams=NoStreams())
    (x,) = case.args
    made = partitioner((x,))
    assert partitioner((torch.randn(4, 7),)) is made
    smaller = partitioner((x[:1],))
    assert smaller is not made
    assert smaller.cuts == made.cuts == partitioner.cuts
    assert smaller.stages[0].meta.inputs[0].meta.shape == (1, 7)
    case.model.eval()
    assert partitioner((x,)) is not made
    case.model.train()
    assert partitioner((x,)) is made
    case.model[0].weight.requires_grad_(False)
    assert partitioner((x,)) is not made


def test_default_keyword_arguments() -> None:
    case = llama()
    assert default_kwargs(case.model, (), case.kwargs) == {"use_cache": False}
    assert default_kwargs(case.model, (), {"use_cache": True}) == {}
    assert default_kwargs(gpt().model) == {}


# -- devices and text -------------------------------------------------------------------------------------------------


def test_another_device_moves_device_constants_and_stray_tensors() -> None:
    case = dicts()
    stage = Partitioner(case.model, 1, streams=NoStreams())(case.args, case.kwargs).stages[0]
    moved = stage.on(torch.device("meta"))
    assert moved.module.get_buffer("constants.table").device.type == "meta"
    assert stage.module.get_buffer("constants.table").device.type == "cpu"
    assert moved.module.get_buffer("offset") is stage.module.get_buffer("offset")
    language = gpt()
    stage = Partitioner(language.model, 1, streams=NoStreams())(language.args).stages[0]
    assert "device(type='cpu')" in stage.code
    assert "device(type='meta')" in stage.on(torch.device("meta")).code
    assert "'cpu'" not in stage.on(torch.device("meta")).code


def test_the_code_can_be_read() -> None:
    case = gpt()
    code = Partitioner(case.model, 2, ["h.2"], streams=NoStreams())(case.args).code
    steps = [line.split(";")[0].strip() for line in code.splitlines() if line.strip()]
    assert steps[steps.index("class submod_1:") :] == [
        "class submod_1:",
        "def forward(self, h_1):",
        "arange = torch.arange(5, device = device(type='cpu'))",
        "getitem = arange[(slice(None, None, None), None)]",
        "getitem_1 = arange[(None, slice(None, None, None))]",
        "ge = getitem.ge(getitem_1)",
        'h_2 = getattr(self.h, "2")(h_1, ge)',
        'h_3 = getattr(self.h, "3")(h_2, ge)',
        "norm = self.norm(h_3)",
        "wte_weight = self.wte.weight",
        "linear = torch._C._nn.linear(norm, wte_weight)",
        "return (linear,)",
    ]


# -- branches on the values of inputs ---------------------------------------------------------------------------------


class Masked(nn.Module):
    """Takes a shorter path if nothing is masked."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = layers(2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        mask[:, -1] = 1
        first = mask[0].clone()
        first.mul_(2)
        if first.eq(2).all():
            return self.layers[1](self.layers[0](x))
        return self.layers[1](self.layers[0](x) * mask[..., None])


def test_a_branch_on_an_integer_input_is_guarded() -> None:
    model, x = Masked(), torch.randn(2, 4, 3)
    full, late = torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64)
    late[:, -1] = 0
    some = full.clone()
    some[0, 1] = 0
    partitioner = Partitioner(model, 2, streams=NoStreams())
    short = partitioner((x, full))
    assert partitioner((x, late)) is short  # the forward sets the last one
    assert late[0, -1] == 0
    long = partitioner((x, some))
    assert long is not short
    assert "mul" in long.stages[0].code + long.stages[1].code
    assert partitioner((x, full)) is short
    (guard,) = short.guards
    assert guard.expected is True
    assert "test_stages.py" in guard.source_line


def test_an_input_that_is_overwritten_with_unknown_values() -> None:
    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        ids[:, 0] = x[:, 0].round().long()
        return self.layers[1](self.layers[0](x)) * ids

    made = Partitioner(model_of(forward), 2, streams=NoStreams())(
        (torch.randn(2, 3), torch.ones(2, 3, dtype=torch.int64))
    )
    assert [i.mutated for i in made.stages[0].meta.inputs] == [False, True]
    assert not made.guards


def test_a_value_that_is_never_the_same_is_refused() -> None:
    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        return self.layers[0](x) * ids.max().item()

    partitioner = Partitioner(model_of(forward), 1, streams=NoStreams())
    with pytest.raises(ValueError, match=r"reads values of its inputs at .*test_stages.py:\d+.*32 microbatches"):
        [partitioner((torch.randn(2, 3), torch.tensor([step]))) for step in range(40)]
