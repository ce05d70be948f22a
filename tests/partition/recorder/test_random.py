"""Random calls draw from streams of their own: recorded calls by name, modules by name and number of the call."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from penstock.partition import Partition, Partitioner
from scaffolding.models import Layers, gpt


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
