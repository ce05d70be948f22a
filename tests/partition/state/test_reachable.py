"""What a forward can reach: whatever changes there is seen, however many other places are looked at with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from penstock._base.compat import fake_mode
from penstock.partition.record.fakes import Loan
from penstock.partition.state.reachable import Reach
from scaffolding.models import OneLayer


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(2, 2) for _ in range(4))
        self.one, self.other = [object()], list[object]()
        self.by_name = {"a": object(), "b": object()}
        self.kinds = {1, 2}
        self.tensor = torch.ones(2)


def _rename(holder: Holder) -> None:
    holder.by_name["c"] = holder.by_name.pop("b")


CHANGES: dict[str, Callable[[Holder], object]] = {
    "attribute": lambda holder: setattr(holder, "one", [*holder.one]),
    "new attribute": lambda holder: setattr(holder, "new", 1),
    "attribute of the last module": lambda holder: setattr(holder.inner[-1], "in_features", 3),
    "an equal tensor": lambda holder: setattr(holder, "tensor", torch.ones(2)),
    "name": _rename,
    "item from list to list": lambda holder: holder.other.append(holder.one.pop()),
    "set": lambda holder: holder.kinds.add(3),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_is_seen_and_put_back(change: str) -> None:
    holder = Holder()
    reach = Reach(holder)
    assert reach.changed() == []
    CHANGES[change](holder)
    assert reach.changed()
    reach.restore()
    assert reach.changed() == []


def test_sparse_buffers_are_lent() -> None:
    """As sparse fakes, which are made in another way than all others."""
    model = nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("sparse", torch.eye(2).to_sparse())
    loan = Loan(model, fake_mode(), torch.device("cpu"))
    assert loan.fakes["sparse"].layout == torch.sparse_coo
    assert loan.fakes["0.weight"].layout == torch.strided


class Warns(OneLayer):
    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("deprecated", UserWarning, stacklevel=1)
        return torch.tanh(self.layer(x))


def test_the_first_warning_of_a_file_is_no_state() -> None:
    """Python notes in the file's globals that it was shown."""
    globals().pop("__warningregistry__", None)
    model = Warns(4)
    reach = Reach(model)
    assert "__warningregistry__" not in globals()
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        model(torch.randn(2, 4))
    assert shown
    assert "__warningregistry__" in globals()
    assert reach.changed() == []


def test_places_are_found_by_every_module_that_leads_to_them() -> None:
    blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
    state = {"seen": [0]}
    blocks[0].state, blocks[1].state, blocks[2].seen = state, state, state["seen"]  # type: ignore[assignment]
    reach = Reach(blocks)
    assert [[place.text for place in reach.holders_in(name)] for name in "012"] == [
        ["0", "0.state", "0.state['seen']"],
        ["1", "0.state", "0.state['seen']"],
        ["2", "0.state['seen']"],
    ]
