"""Random calls draw from streams of their own: recorded calls by name, modules by name and number of the call."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.partition import Partition, Partitioner
from scaffolding.models import Layers, OneLayer, gpt
from scaffolding.proofs import proven


class Streams:
    """Seeds the generator by name and remembers the names."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def enter(self, name: str) -> None:
        self.names.append(name)
        torch.manual_seed(sum(map(ord, name)))


def run(model: nn.Module, stages: int, *args: Tensor) -> tuple[Tensor, list[str], Partition]:
    """The stages one after the other, with a hook that seeds each drawing module by name and number of the call."""
    streams = Streams()
    made = Partitioner(model, stages, streams=streams)(args)
    values = {(-1, i.name): t for i, t in zip(made.stages[0].meta.inputs, made.arrange(args), strict=True)}
    for stage, offsets in zip(made.stages, made.draw_offsets, strict=True):
        handles = []
        for name, module in made.drawing_modules.items():
            calls = iter(range(offsets[name], 100))
            handles.append(
                module.register_forward_pre_hook(lambda *_, n=name, c=calls: streams.enter(f"{n}#{next(c)}"))
            )
        outputs = stage.module(*(values[i.source, i.name] for i in stage.meta.inputs))
        values.update({(stage.meta.index, o.name): t for o, t in zip(stage.meta.outputs, outputs, strict=True)})
        for handle in handles:
            handle.remove()
    return made.build_output(outputs), streams.names, made


def test_dropout_is_the_same_for_any_number_of_stages() -> None:
    case = gpt(dropout=0.5)
    expected, names, made = run(case.model, 1, *case.args)
    assert names == ["()#0", *(f"h.{i}{part}" for i in range(4) for part in ("#0", ".drop#0", ".drop#1"))]
    assert sorted(made.drawing_modules) == sorted([f"h.{i}" for i in range(4)] + [f"h.{i}.drop" for i in range(4)])
    for stages in (2, 3, 4):
        result, again, _ = run(case.model, stages, *case.args)
        assert torch.equal(result, expected)
        assert again == names


def test_evaluation_draws_nothing() -> None:
    case = gpt(dropout=0.5)
    _, names, made = run(case.model.eval(), 2, *case.args)
    assert names == []
    assert not made.drawing_modules


class SharedDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(layer(x))
        return x


def test_a_module_that_is_called_on_several_stages_counts_on() -> None:
    model, x = SharedDropout(), torch.randn(4, 3)
    expected, names, _ = run(model, 1, x)
    assert names == ["drop#0", "drop#1", "drop#2"]
    result, again, made = run(model, 3, x)
    assert again == names
    assert torch.equal(result, expected)
    assert [offsets["drop"] for offsets in made.draw_offsets] == [0, 1, 2]


def test_noise_outside_of_blocks_is_drawn_on_one_stage() -> None:
    class Noisy(Layers):
        def forward(self, x: Tensor) -> Tensor:
            noise = torch.rand(3)
            mask = torch.empty(3).bernoulli_(0.5)
            return self.layers[1](F.dropout(self.layers[0](x) * noise, 0.5) * mask) + noise

    _, names, made = run(Noisy(3, 2), 2, torch.randn(2, 3))
    assert names == ["()#0", "()#1", "()#2"]
    assert ("rand", 0) in [(i.name, i.source) for i in made.stages[1].meta.inputs]


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 2), (1.0, 0)])
def test_layer_drop_at_a_rate_that_decides_it(rate: float, kept: int) -> None:
    class Dropping(Layers):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                if not torch.rand([]) < rate:
                    x = layer(x)
            return x

    _, names, made = run(Dropping(3, 2), 1, torch.randn(2, 3))
    assert names == []  # a draw that nothing uses is left out
    assert made.code.count("self.layers") == kept


class MadeInForward(OneLayer):
    """Has no dropout among its modules; its forward makes one."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.Dropout(0.5)(self.layer(x))


def test_a_dropout_that_the_forward_makes_draws_from_the_stream_of_its_block() -> None:
    torch.manual_seed(0)
    blocks = nn.Sequential(*(MadeInForward(6) for _ in range(4)))
    assert list(Partitioner(blocks, 2, streams=Streams())((torch.randn(4, 6),)).drawing_modules) == ["0", "1", "2", "3"]
    proven(blocks, torch.randn(4, 6), torch.randn(4, 6), ranks=2, microbatches=2)
