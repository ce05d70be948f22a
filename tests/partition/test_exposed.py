"""Values that leave a block by another way than its result: through a hook, as models of experts collect logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock import PartitionError, inspect
from penstock.partition.record.attempts import record
from penstock.partition.units import UnitSpec, find_units
from scaffolding.models import OneLayer
from scaffolding.proofs import proven

WIDTH = 6


class Expert(OneLayer):
    def forward(self, x: Tensor, share: Tensor) -> Tensor:
        return x + self.layer(x) * share[:, None]


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ self.weight
        return logits, logits.sigmoid()


class Block(nn.Module):
    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.norm, self.router, self.expert = nn.LayerNorm(WIDTH), make(), Expert(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        _, share = self.router(x)
        return self.norm(self.expert(x, share))


COLLECTED: list[Tensor] = []


def collect(module: nn.Module, args: tuple[Tensor, ...], result: tuple[Tensor, ...]) -> None:
    COLLECTED.append(result[0])


class Collecting(nn.Module):
    """Its result is computed from what a hook has taken out of the blocks."""

    def __init__(self, make: Callable[[], nn.Module] = Router) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(make) for _ in range(4))
        for block in self.blocks:
            block.router.register_forward_hook(collect)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        COLLECTED.clear()
        for block in self.blocks:
            x = block(x)
        return x, torch.stack(COLLECTED).square().mean()


def both(output: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    return (output[0] - target).square().mean() + output[1]


def test_a_blocks_inner_result_is_used_by_the_model() -> None:
    torch.manual_seed(0)
    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    report = proven(Collecting(), x, y, both, ranks=4, microbatches=2, schedule="zb-h1", exact=True)
    assert sum(row.kind == "gradient" for row in report.rows) == 5 * 4


def test_the_block_is_opened_and_nothing_else() -> None:
    model = Collecting()
    recording = record(model, (torch.randn(5, WIDTH),), {})
    assert recording.unit_spec.opened == {f"blocks.{i}" for i in range(4)}
    units = {unit.name for unit in find_units(model, recording.unit_spec).values()}
    assert units == {f"blocks.{i}.{part}" for i in range(4) for part in ("norm", "router", "expert")}
    assert {unit.name for unit in find_units(model).values()} == {f"blocks.{i}" for i in range(4)}
    assert inspect(model, (torch.randn(5, WIDTH),), stages=4).stages


def test_another_block_of_the_class_may_stay_whole() -> None:
    torch.manual_seed(0)
    model = Collecting()
    model.blocks[0].router._forward_hooks.clear()
    x, y = torch.randn(5, WIDTH), torch.randn(5, WIDTH)
    proven(model, x, y, both, ranks=2, microbatches=2, leaf_modules=["blocks.0"])


class Hidden(Router):
    """Hands on what it has not returned."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.logits = super().forward(x)[0]
        return (self.logits * 2).sigmoid(), self.logits.sigmoid()


def test_what_no_module_returns_is_refused_with_the_line_where_the_module_must_stay_whole() -> None:
    model = Collecting(Hidden)

    def forward(x: Tensor) -> Tensor:
        return model.blocks[0](x) * model.blocks[0].router.logits[:, None]

    model.forward = forward
    with pytest.raises(PartitionError, match=r"test_exposed.py:\d+, in the model, .*blocks.0.router.logits. Return it"):
        record(model, (torch.randn(5, WIDTH),), {}, UnitSpec(("blocks.0",)))
