"""Tied parameters: which ranks reduce what, and sums that are the same on every holder."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from penstock.runtime.gradients.sums import TieGroup, TieReducer, tie_groups
from scaffolding.local_collectives import collective_transports


@given(
    st.dictionaries(st.text("abcd", min_size=1), st.lists(st.integers(0, 3), min_size=2, unique=True).map(sorted)),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)
def test_every_parameter_is_in_one_group_unless_one_rank_holds_it_alone(
    shared: dict[str, list[int]], rank_of: list[int]
) -> None:
    groups = tie_groups(shared, rank_of)
    found = [name for group in groups for name in group.names]
    spread = {name for name, stages in shared.items() if len({rank_of[stage] for stage in stages}) > 1}
    assert sorted(found) == sorted(spread)
    for group in groups:
        assert group.ranks == tuple(sorted({rank_of[stage] for stage in group.stages}))
        assert all(tuple(shared[name]) == group.stages for name in group.names)


def reducers(
    values: list[list[Tensor]], group: TieGroup | None = None
) -> tuple[list[list[nn.Parameter]], list[TieReducer]]:
    """A reducer for each rank, of parameters with these values."""
    ranks = len(values)
    transports = collective_transports(ranks)
    held = [[nn.Parameter(value.clone()) for value in mine] for mine in values]
    names = tuple(f"p{i}" for i in range(len(values[0])))
    group = TieGroup(names, tuple(range(ranks)), tuple(range(ranks)))
    return held, [TieReducer(0, group, mine, transports[rank], range(ranks)) for rank, mine in enumerate(held)]


def step(made: list[TieReducer], held: list[list[nn.Parameter]], grads: list[list[Tensor | None]]) -> None:
    """One training step whose own contributions to `.grad` are these."""
    for reducer in made:
        reducer.set_aside()
    for mine, new in zip(held, grads, strict=True):
        for parameter, grad in zip(mine, new, strict=True):
            there = parameter.grad  # a place in the buffer, once there was a gradient
            assert there is None or not there.any(), "what was there before is set aside"
            if grad is not None:
                parameter.grad = grad.clone() if there is None else there.add_(grad)
    for reducer in made:
        reducer.start()
    for reducer in made:
        reducer.finish()


def test_copies_start_equal_to_the_first_of_their_own_ranks() -> None:
    """Which need not be rank 0, where the parameter is not."""
    transports = collective_transports(3)
    held = {rank: nn.Parameter(torch.full((2,), float(rank))) for rank in (1, 2)}
    group = TieGroup(("p",), (1, 2), (1, 2))
    made = [TieReducer(0, group, [held[rank]], transports[rank], range(3)) for rank in (1, 2)]
    for reducer in made:
        reducer.start_copies()
    for reducer in made:
        reducer.finish_copies()
    assert [parameter.tolist() for parameter in held.values()] == [[1.0, 1.0]] * 2


def test_gradients_are_summed_and_accumulate_over_steps() -> None:
    held, made = reducers([[torch.zeros(3, 2)]] * 3)
    before = torch.zeros(3, 2)
    for _ in range(3):
        grads = [torch.randn(3, 2) for _ in range(3)]
        step(made, held, [[grad] for grad in grads])
        before = before + (grads[0] + grads[1] + grads[2])
        for (parameter,) in held:
            assert parameter.grad is not None
            assert torch.equal(parameter.grad, before)
    grads_now = [parameter.grad for (parameter,) in held]
    assert len({grad.data_ptr() for grad in grads_now if grad is not None}) == 3


@pytest.mark.parametrize("holders", [(True, False), (False, True), (False, False), (True, True)])
def test_a_rank_without_a_gradient_gets_the_others_and_nobody_gets_one_from_nobody(holders: tuple[bool, bool]) -> None:
    held, made = reducers([[torch.zeros(2), torch.zeros(3)]] * 2)
    grads: list[list[Tensor | None]] = [[torch.ones(2), torch.ones(3) if has else None] for has in holders]
    step(made, held, grads)
    for first, second in held:
        assert torch.equal(first.grad, torch.full((2,), 2.0))
        if not any(holders):
            assert second.grad is None
        else:
            assert torch.equal(second.grad, torch.full((3,), float(sum(holders))))
    step(made, held, [[None, None], [None, None]])
    for first, second in held:  # what was there stays
        assert torch.equal(first.grad, torch.full((2,), 2.0))
        assert (second.grad is None) == (not any(holders))


def test_dtypes_and_strides_are_kept() -> None:
    values = [
        torch.zeros(2, 2),
        torch.zeros(2, 2).half(),
        torch.zeros(3).bfloat16(),
        torch.zeros(1, 2, 3, 3).to(memory_format=torch.channels_last),
        torch.zeros(()),
    ]
    held, made = reducers([values, values])
    grads = [torch.ones_like(value) for value in values]
    step(made, held, [list(grads), list(grads)])
    for mine in held:
        for parameter in mine:
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
            assert parameter.grad.stride() == parameter.stride()
            assert torch.equal(parameter.grad, torch.full_like(parameter, 2.0))
